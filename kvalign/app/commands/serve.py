"""`kvalign serve`: many endless streams behind the interface of OpenAI's API."""

import contextlib
import dataclasses
import os
import sys

from kvalign.app.serve.settings import ServeSettings

HAS_JSON = False


def run(settings: ServeSettings, as_json: bool) -> None:
    from kvalign.app.commands.demo_ui import free_port
    from kvalign.app.serve.server import serve
    from kvalign.foundation.files import locked

    if settings.api_key is None and (key := os.environ.get("KVALIGN_API_KEY")):
        settings = dataclasses.replace(settings, api_key=key)
    port = free_port(settings.host, settings.port)
    if settings.api_key is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        print("others can reach this server: --api-key asks them for a key", file=sys.stderr)
    with locked(settings.sessions) if settings.sessions else contextlib.nullcontext():
        serve(settings, settings.load(), port)
