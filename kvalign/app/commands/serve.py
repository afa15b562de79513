"""`kvalign serve`: the OpenAI API. It takes its address and answers there while all else loads."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvalign.app.sessions.conversation import TalkSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import like, option
from kvalign.streaming.sampling import Sampling

_LARGEST = 2**20  # bytes of a request that are read before it is answered
_PATIENCE_S = 5
# What is answered until the model is there: of /health, and in the form of OpenAI's errors.
LOADING = """{"status": "loading", "error": {"message": "the model is loading", "type": \
"server_error", "param": null, "code": "loading"}}
"""


def lets_others_in(host: str) -> bool:
    """Return whether a server at this address can be reached from other machines."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at the port, for 0 at any free one; UserError where it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is in use: name another with --port, or 0 for any free one"
            ) from None
        raise UserError(f"cannot listen on --host {host}: {error.strerror}") from None


def url_of(host: str, at: socket.socket) -> str:
    """`http://127.0.0.1:8000`, with the host as the user named it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}"


@contextmanager
def loading(at: socket.socket) -> Iterator[None]:
    """Within it each request is answered by 503 and `LOADING`; those that come as it ends wait."""
    about = {"Content-Type": "application/json", "Content-Length": f"{len(LOADING)}"}

    class Loading(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            length = self.headers.get("Content-Length", "")
            self.rfile.read(min(int(length), _LARGEST) if length.isdecimal() else 0)
            self.send_response_only(503)
            for name, value in (*about.items(), ("Retry-After", "1")):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(LOADING.encode("ascii"))

        do_HEAD = do_POST = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(at.getsockname()[:2], Loading, bind_and_activate=False)
    server.socket.close()
    server.socket = at
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class ServeSettings(TalkSettings):
    """Serve a model behind the OpenAI API: chat, completions and responses.

    Each stream has a cache of fixed size and no end. A request with a `session` (field, or header
    X-Session-Id) continues that session. If neither a request nor a flag sets sampling, the model's
    generation_config does, else the defaults of `kvalign chat` hold. The key may also be in
    KVALIGN_API_KEY.

    Example:
        kvalign serve --model gpt2-mini --cache-size 128 --sessions talks
    """

    host: str = option(
        "127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines connect"
    )
    port: int = option(
        8000, help="port to listen on; 0 chooses a free one", at_least=0, at_most=65535
    )
    api_key: str | None = option(
        None, help="bearer token for requests; required if --host lets other machines connect"
    )
    without_key: bool = option(False, help="let other machines connect without a key")
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        help="values of a request's Host header that are allowed, besides localhost and addresses",
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        help="origins of pages that may connect, besides this server's own: chrome-extension://ID",
    )
    sessions: Path | None = option(
        None,
        help="folder that keeps sessions over a restart (default: only in memory)",
        writes="folder",
    )
    max_sessions: int = option(
        256,
        help="most named sessions to keep; beyond that the least recently used one is dropped",
        at_least=1,
    )
    max_unnamed: int = option(
        64,
        help="most conversations without a session to keep in memory; later requests find them "
        "by their beginning",
        at_least=0,
    )
    keep_unnamed: bool = option(
        False, help="keep conversations without a session in --sessions, too"
    )
    edit: bool = option(
        False,
        help="a conversation without a session whose earlier messages were changed or left out "
        "keeps what follows them: it is moved, not encoded again, and knows what it has read",
    )
    exactly: int = option(
        4, help="tokens behind each change of --edit that are encoded again", at_least=0, at_most=16
    )
    max_streams: int = option(64, help="most streams at the same time", at_least=1)
    max_queue: int = option(
        256, help="most requests that may wait; further ones get 429", at_least=0
    )
    max_new_tokens: int | None = like(Sampling, "max_new_tokens", more=" (default: 2048)")
    max_prompt_tokens: int = option(32768, help="most tokens of one request", at_least=1)
    max_body_kb: int = option(1024, help="most kilobytes of a request's body", at_least=1)
    seed: int | None = option(
        None, help="random seed of requests without one (default: random)", at_least=0
    )
    timeout: float = option(
        30.0, help="seconds for a client to send a request, and to receive a piece", above=0
    )

    @property
    def num_streams(self) -> int:
        return self.max_streams

    @property
    def is_editable(self) -> bool:
        return self.edit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.without_key and self.api_key is not None:
            raise UserError("--without-key and a key contradict each other: leave one out")
        if self.edit and self.evict == "turns":
            raise UserError("--edit and --evict turns contradict each other: leave one out")
        if self.keep_unnamed and self.sessions is None:
            raise UserError("--keep-unnamed needs a folder: --sessions DIR")


def serve(settings: ServeSettings, as_json: bool) -> None:
    from kvalign.foundation.files import locked

    settings = settings.resolved()
    key = os.environ.get("KVALIGN_API_KEY")
    if settings.api_key is None and key and not settings.without_key:
        settings = replace(settings, api_key=key)
    if lets_others_in(settings.host) and settings.api_key is None and not settings.without_key:
        raise UserError(
            f"--host {settings.host} lets other machines connect: give --api-key (or "
            "KVALIGN_API_KEY), or --without-key to ask for no key"
        )
    lock = locked(settings.sessions) if settings.sessions else nullcontext()
    with listening(settings.host, settings.port) as at, lock:
        with loading(at):
            from kvalign.app.serve import server

            app = server.build(settings, settings.load())
        server.serve(settings, app, at)
