"""`kvalign serve`: serve many endless streams behind the OpenAI API."""

import contextlib
import dataclasses
import os

from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError

HAS_JSON = False


def run(settings: ServeSettings, as_json: bool) -> None:
    from kvalign.app.commands.demo_ui import free_port
    from kvalign.app.serve.server import serve
    from kvalign.foundation.files import locked

    key = os.environ.get("KVALIGN_API_KEY")
    if settings.api_key is None and key and not settings.without_key:
        settings = dataclasses.replace(settings, api_key=key)
    if settings.lets_others_in and settings.api_key is None and not settings.without_key:
        raise UserError(
            f"--host {settings.host} lets other machines connect: give --api-key (or "
            "KVALIGN_API_KEY), or --without-key to ask for no key"
        )
    port = free_port(settings.host, settings.port)
    with locked(settings.sessions) if settings.sessions else contextlib.nullcontext():
        serve(settings, settings.load(), port)
