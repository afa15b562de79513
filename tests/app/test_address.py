"""The address of `kvalign serve`, which is taken at once."""

import socket

import pytest

from kvalign.app.cli.main import main
from kvalign.app.commands import serve as address
from kvalign.foundation.errors import UserError


def test_an_address_of_the_sixth_version():
    try:
        with address.listening("::1", 0) as at:
            assert address.url_of("::1", at) == f"http://[::1]:{at.getsockname()[1]}"
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
def test_who_asks_while_the_model_loads_waits(fails, monkeypatch, capsys):
    taken, listening = [], address.listening

    def load(settings):
        (at,) = taken
        with socket.create_connection(at.getsockname()) as client, at.accept()[0] as accepted:
            client.sendall(b"GET")
            assert accepted.recv(3) == b"GET"
        if fails:
            raise UserError("it has no weights")

    monkeypatch.setattr(address, "listening", lambda *at: taken.append(listening(*at)) or taken[0])
    monkeypatch.setattr(address.ServeSettings, "load", load)
    monkeypatch.setattr("kvalign.app.serve.server.build", lambda *_: None)
    monkeypatch.setattr(
        "kvalign.app.serve.server.serve", lambda settings, app, at, url: taken.append(at)
    )
    assert main(["serve", "--model", "gpt2-mini", "--port", "0"]) == (2 if fails else 0)
    assert taken[1:] == ([] if fails else taken[:1])
    assert capsys.readouterr().err.count("it has no weights") == fails
