"""`kvalign serve`: serve many endless streams behind the OpenAI API."""

import contextlib
import dataclasses
import os

from kvalign.app.serve.settings import ServeSettings, lets_others_in
from kvalign.foundation.errors import UserError

# What is answered until the model is there: of /health, and in the form of OpenAI's errors.
LOADING = """{"status": "loading", "error": {"message": "the model is loading", "type": \
"server_error", "param": null, "code": "loading"}}
"""


def serve(settings: ServeSettings, as_json: bool) -> None:
    from kvalign.app.address import listening, loading
    from kvalign.foundation.files import locked

    key = os.environ.get("KVALIGN_API_KEY")
    if settings.api_key is None and key and not settings.without_key:
        settings = dataclasses.replace(settings, api_key=key)
    if lets_others_in(settings.host) and settings.api_key is None and not settings.without_key:
        raise UserError(
            f"--host {settings.host} lets other machines connect: give --api-key (or "
            "KVALIGN_API_KEY), or --without-key to ask for no key"
        )
    lock = locked(settings.sessions) if settings.sessions else contextlib.nullcontext()
    with listening(settings.host, settings.port) as at, lock:
        with loading(at, "application/json", LOADING):
            from kvalign.app.serve import server

            app = server.build(settings, settings.load())
        server.serve(settings, app, at)
