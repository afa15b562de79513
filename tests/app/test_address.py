"""The address of `kvalign serve`: taken at once, answered while the model loads."""

import socket

import httpx
import pytest
from helpers.patience import PATIENCE_S

from kvalign.app.cli.main import main
from kvalign.app.commands import serve as address
from kvalign.foundation.errors import UserError


def test_it_says_that_it_loads_whatever_is_asked():
    with address.listening("127.0.0.1", 0) as at:
        url = address.url_of("127.0.0.1", at)
        with address.loading(at), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS"):
                content = 10**6 * b"x" if method == "POST" else None
                answer = client.request(method, "/any", content=content)
                assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
                assert answer.text == ("" if method == "HEAD" else address.LOADING)
        # Whoever comes between waits for the server itself.
        with socket.create_connection(at.getsockname()) as client, at.accept()[0] as accepted:
            client.sendall(b"GET")
            assert accepted.recv(3) == b"GET"


def test_an_address_of_the_sixth_version():
    try:
        with address.listening("::1", 0) as at:
            assert address.url_of("::1", at) == f"http://[::1]:{at.getsockname()[1]}"
            with address.loading(at):
                assert httpx.get(address.url_of("::1", at), timeout=PATIENCE_S).status_code == 503
    except UserError as error:
        pytest.skip(str(error))


def test_what_cannot_be_listened_at_is_one_line():
    with address.listening("127.0.0.1", 0) as at:
        port = at.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use: name another with --port"):
            address.listening("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot listen on --host 192.0.2.1: "):
        address.listening("192.0.2.1", 0)


@pytest.mark.parametrize("fails", [False, True])
def test_serve_answers_before_the_model_is_there(fails, monkeypatch, capsys):
    taken, answers, listening = [], [], address.listening

    def load(settings):
        url = address.url_of("127.0.0.1", taken[0])
        answers.extend(
            httpx.get(f"{url}{path}", timeout=PATIENCE_S) for path in ("/health", "/v1/models")
        )
        if fails:
            raise UserError("it has no weights")

    monkeypatch.setattr(address, "listening", lambda *at: taken.append(listening(*at)) or taken[0])
    monkeypatch.setattr(address.ServeSettings, "load", load)
    monkeypatch.setattr("kvalign.app.serve.server.build", lambda *_: None)
    monkeypatch.setattr(
        "kvalign.app.serve.server.serve", lambda settings, app, at, url: taken.append(at)
    )
    assert main(["serve", "--model", "gpt2-mini", "--port", "0"]) == (2 if fails else 0)
    assert [one.status_code for one in answers] == [503, 503]
    assert answers[0].json()["status"] == "loading"
    assert answers[1].json()["error"]["message"] == "the model is loading"
    assert taken[1:] == ([] if fails else taken[:1])
    assert capsys.readouterr().err.count("it has no weights") == fails
