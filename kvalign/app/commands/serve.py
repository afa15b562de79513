"""`kvalign serve`: the OpenAI API. It takes its address at once; who asks meanwhile waits."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import nullcontext
from dataclasses import replace

from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError


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
        from kvalign.app.serve import server

        app = server.build(settings, settings.load())
        server.serve(settings, app, at, url_of(settings.host, at))
