"""The address of a command that serves: it is taken at once, and answers while all else loads."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvalign.foundation.errors import UserError

_LARGEST = 2**20  # bytes of a request that are read before it is answered
_PATIENCE_S = 5


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
def loading(at: socket.socket, kind: str, body: str) -> Iterator[None]:
    """Within it each request is answered with status 503 and a body of this kind. Those that come
    as it ends wait for whoever accepts next.
    """

    class Loading(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            length = self.headers.get("Content-Length", "")
            self.rfile.read(min(int(length), _LARGEST) if length.isdecimal() else 0)
            self.send_response_only(503)
            for name, value in (("Content-Type", kind), ("Content-Length", f"{len(body)}")):
                self.send_header(name, value)
            self.send_header("Retry-After", "1")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode("ascii"))

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
