"""`kvalign serve` and requests that are malformed, too large, unauthorised or slow: each is
answered in the form of OpenAI's API, and a stream beside them loses nothing.
"""

import asyncio
import json
import socket
from itertools import islice
from types import SimpleNamespace

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.served import serving

from kvalign.app.serve.reading import Reading
from kvalign.app.serve.replies import Events, EventStream, TextForm
from kvalign.app.serve.turn import AnswerPiece, Answers
from kvalign.app.serve.wire import Completion
from kvalign.models.loading import load_model

SERVED = dict(cache_size=48, api_key="secret")
SERVED |= dict(max_body_kb=100, max_prompt_tokens=1000, max_streams=4)
KEY = {"Authorization": "Bearer secret"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LEAVE = object()  # in place of a field that is left out


def chat(**fields):
    asked = {"model": "gpt2-mini", "messages": HELLO, "max_tokens": 2, **fields}
    return CHAT, {name: x for name, x in asked.items() if x is not LEAVE}


def text(**fields):
    asked = {"model": "gpt2-mini", "prompt": "Hello", "max_tokens": 2, **fields}
    return TEXT, {name: x for name, x in asked.items() if x is not LEAVE}


def says(role, content):
    return {"role": role, "content": content}


# What is asked, the status, and what the message says; `param` and `code` where they are told.
BODIES = [
    (CHAT, b"{", 400, "not JSON"),
    (CHAT, b"[" * 100_000, 400, "not JSON"),
    (CHAT, b'{"x": "' + b"a" * 200_000 + b'"}', 413, "at most 100000 bytes"),
    (TEXT, b'{"model": "gpt2-mini", "prompt": "\\ud800"}', 400, "UTF-8"),
    (*chat(model="gpt-4"), 404, "'gpt-4' is not served here"),
    (*chat(messages=[*HELLO, says("system", "x"), *HELLO]), 400, "only the first message may be"),
    (*chat(messages=[says("system", "word " * 100), *HELLO]), 400, "system message takes"),
    (*chat(n=100), 400, "n must be at most 4"),
    (*chat(n=2, session="a"), 400, "a session has one prompt"),
    (*chat(session="../../etc/passwd"), 400, "session"),
    (*text(session="a"), 400, "session is not supported: leave it out"),
    (*text(prompt=""), 400, "the prompt is empty"),
    (*text(prompt=[1, 10**6]), 400, "token ids must be below 8192"),
    (*text(prompt="a b " * 2000), 400, "for a request are 1000"),
]
HEADERS = [
    ({}, 401, "API key missing"),
    ({"Authorization": "Bearer wrong"}, 401, "API key missing"),
    ({**KEY, "Content-Type": "text/plain"}, 415, "application/json"),
    ({**KEY, **JSON, "Host": "evil.example"}, 403, "is not allowed here"),
    ({**KEY, **JSON, "Origin": "https://evil.example"}, 403, "are not allowed here"),
    ({**KEY, **JSON, "X-Session-Id": "a/b"}, 400, "session"),
]


@pytest.fixture(scope="module")
def post(server):
    with httpx.Client(base_url=server.address, timeout=PATIENCE_S) as client:
        yield client.post


@pytest.fixture(scope="module", autouse=True)
def beside(server):
    """A stream that is there all the time: it is what it is alone."""
    asked = dict(model="gpt2-mini", prompt="The history", temperature=0, max_tokens=2000)
    with server.client("secret") as client:
        pieces = client.completions.create(**asked, stream=True)
        first = next(pieces).choices[0].text
        yield
        text = first + "".join(piece.choices[0].text for piece in islice(pieces, 100))
        pieces.close()
        asked["max_tokens"] = 150
        assert client.completions.create(**asked).choices[0].text.startswith(text)


def is_form(reply, status, message):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"] and "\n" not in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(("path", "body", "status", "message"), BODIES)
def test_bodies(path, body, status, message, post):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    is_form(post(path, content=body, headers={**KEY, **JSON}), status, message)


@pytest.mark.parametrize(("headers", "status", "message"), HEADERS)
def test_headers(headers, status, message, post):
    path, body = chat()
    is_form(post(path, content=json.dumps(body).encode(), headers=headers), status, message)


def test_addresses(server):
    with httpx.Client(base_url=server.address, headers=KEY, timeout=PATIENCE_S) as client:
        is_form(client.get("/v1/nothing"), 404, "no such address")
        is_form(client.get(CHAT), 405, "needs another HTTP method")
        is_form(client.get("/v1/models/other"), 404, "is not served here")
        for path in ("/docs", "/openapi.json", "/v1/models/../../etc/passwd"):
            assert client.get(path).status_code == 404
        assert client.get("/health", headers={"Authorization": ""}).status_code == 200
        assert client.get("/metrics", headers={"Authorization": ""}).status_code == 401
        for path in ("/", "/v1", "/v1/"):  # the address that is printed
            assert "\n/v1/chat/completions\n" in client.get(path).text
        page = client.get("/", headers=BROWSER | {"Authorization": ""})  # which asks for the key
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.text and "gpt2-mini" not in page.text
        assert client.get("/", headers={"Authorization": ""}).status_code == 401
        assert client.get("/v1", headers=BROWSER | {"Authorization": ""}).status_code == 401
        told = client.get("/metrics").text
        assert "kvalign_generated_tokens_total" in told and "kvalign_streams " in told
        assert "kvalign_streams 0.0" not in told, "there is the one beside"


def test_heads_and_slashes(server):
    """Watchdogs ask with HEAD, and with a slash at the end."""
    with httpx.Client(base_url=server.address, timeout=PATIENCE_S) as client:
        for path in ("/health", "/health/"):
            assert client.get(path).json() == {"status": "ok"}
            reply = client.head(path)
            assert (reply.status_code, reply.content) == (200, b"")
        assert client.head("/v1/models/").status_code == 401
        assert client.head("/v1/models/", headers=KEY).status_code == 200
        (model,) = client.get("/v1/models/", headers=KEY).json()["data"]
        assert client.get("/v1/models/gpt2-mini/", headers=KEY).json() == model
        assert model["id"] == "gpt2-mini"
        path, body = chat()
        assert client.post(f"{path}/", json=body, headers=KEY).status_code == 200
        is_form(client.get("/v2//", headers=KEY), 404, "no such address")


def test_origins(server):
    """A page's Origin is this very host, or one that is allowed: an extension of the browser."""
    extension = "chrome-extension://abcdefghijklmnopabcdefghijklmnop"
    here = server.address.removeprefix("http://")
    path, body = chat()

    def status(address, origin, method="POST", **headers):
        given = {**KEY, "Origin": origin, **headers}
        return httpx.request(method, f"{address}{path}", json=body, headers=given)

    for origin in (f"http://{here}", f"https://{here}"):
        assert status(server.address, origin).status_code == 200
    for origin in (extension, f"chrome-extension://{here}", f"file://{here}", "null", ""):
        is_form(status(server.address, origin), 403, "are not allowed here")
    with serving(load_model("gpt2-mini"), allowed_origins=(extension,)) as other:
        reply = status(other.address, extension)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == extension
        assert "X-KVAlign-Warning" in reply.headers["access-control-expose-headers"]
        asking = {"Access-Control-Request-Method": "POST"}
        assert status(other.address, extension, "OPTIONS", **asking).status_code == 200
        is_form(status(other.address, f"{extension}x"), 403, "are not allowed here")


def raw(server, request):
    """What is answered to these bytes, and no more of them."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        connection.sendall(request)
        return connection.recv(65536)


def head(*lines):
    return "\r\n".join([f"POST {TEXT} HTTP/1.1", *lines, "", ""]).encode()


def test_a_body_that_does_not_come(server, loaded):
    lines = ("Host: localhost", "Authorization: Bearer secret", "Content-Type: application/json")
    with serving(loaded, cache_size=48, timeout=0.5) as hasty:
        assert b" 408 " in raw(hasty, head(*lines, "Content-Length: 100") + b'{"model"')
    assert b" 413 " in raw(server, head(*lines, "Content-Length: 999999999"))
    chunked = head(*lines, "Transfer-Encoding: chunked") + b"20000\r\n" + b"a" * 0x20000 + b"\r\n"
    assert b" 413 " in raw(server, chunked)
    assert b" 400 " in raw(server, b"nonsense\r\n\r\n")
    assert b" 403 " in raw(server, head("Authorization: Bearer secret", "Host:"))


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_left():
    answers, events, cancelled = Answers(1, Reading()), Events(), []
    answers.turns.append(SimpleNamespace(cancel=lambda: cancelled.append(True)))
    events.put_nowait(AnswerPiece(0, "text"))
    form = TextForm("m", Completion(model="m", prompt="?"), answers)
    stream = EventStream(form, events, timeout=0.05, ignored=())

    async def send(message):
        if b"text" in message.get("body", b""):
            await asyncio.sleep(2 * PATIENCE_S)

    async def receive():
        await asyncio.sleep(2 * PATIENCE_S)

    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), PATIENCE_S))
    assert cancelled
