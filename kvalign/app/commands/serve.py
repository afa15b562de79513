"""`kvalign serve`: the OpenAI API. It takes its address and answers there while all else loads."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError

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
            raise UserError(f"port {port} is in use: name another with --port, or 0") from None
        raise UserError(f"cannot listen on --host {host}: {error.strerror}") from None


def url_of(host: str, at: socket.socket) -> str:
    """`http://127.0.0.1:8000`, with the host as the user named it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}"


@contextmanager
def loading(at: socket.socket) -> Iterator[None]:
    """Within it each request is answered by 503 and `LOADING`; those that come as it ends wait."""

    class Loading(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S
        error_message_format, error_content_type = LOADING, "application/json"

        def do_GET(self) -> None:
            length = self.headers.get("Content-Length", "")
            self.rfile.read(min(int(length), _LARGEST) if length.isdecimal() else 0)
            self.send_error(503)

        do_HEAD = do_POST = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

        def end_headers(self) -> None:
            self.send_header("Retry-After", "1")
            super().end_headers()

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
        server.serve(settings, app, at, url_of(settings.host, at))
