"""`kvalign demo-ui`: the live page on this machine."""

import functools
import os
import signal
import webbrowser
from dataclasses import dataclass

from kvalign import checkpoints
from kvalign.app.address import listening, loading, url_of
from kvalign.app.pages import source
from kvalign.app.serve.settings import lets_others_in
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import (
    DEVICE,
    OF_WEIGHTS,
    WEIGHTS,
    Settings,
    like,
    option,
)


@dataclass(frozen=True, kw_only=True)
class PageSettings(Settings):
    """Watch methods write side by side, on a page that is served from this machine until Ctrl-C.
    Texts are already being written when it opens.

    The page loads nothing from elsewhere and sends nothing away. --memory switches the memory on at
    the start; the page has a switch for it. The page asks for no key.

    Example:
        kvalign demo-ui --port 0
    """

    host: str = option(
        "127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines connect"
    )
    port: int = option(
        7860, help="port to listen on; 0 chooses a free one", at_least=0, at_most=65535
    )
    without_key: bool = option(False, help="let other machines connect without a key")
    model: str = option(
        "gpt2-mini", help="shipped name, hub id or folder; the shipped models are always offered"
    )
    aligner: str | None = option(
        None,
        help="folder, shipped name or hub id of an aligner; offered beside the shipped ones",
    )
    memory: int | None = like(
        CacheSizes, "memory", more=" (default: off; 100000 once switched on)", at_least=1
    )
    num_recalled: int | None = like(CacheSizes, "num_recalled", at_least=1)
    cache_dtype: str = like(CacheSizes, "cache_dtype", "model", more="")
    weights: str = option("float32", help=OF_WEIGHTS, choices=WEIGHTS)
    device: str = option("auto", help=DEVICE)
    open: bool = option(False, help="open the page in a browser")


def demo_ui(settings: PageSettings, as_json: bool) -> None:
    if lets_others_in(settings.host) and not settings.without_key:
        raise UserError(
            f"--host {settings.host} lets other machines connect, and the page has no key: give "
            "--without-key to allow that, or use an SSH tunnel"
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with listening(settings.host, settings.port) as at:
        print(f"running on {url_of(settings.host, at)} (Ctrl-C ends it)", flush=True)
        if settings.open:
            webbrowser.open(url_of(settings.host, at))
        with loading(at, "text/html", source("loading.html")):
            os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
            from kvalign.app.pages.page import application, build, serve
            from kvalign.models import fetched
            from kvalign.models.loading import load_model

            here = filter(fetched.model_path, fetched.MODELS)
            models = list(dict.fromkeys((settings.model, *checkpoints.WRITERS, *here)))
            load = functools.partial(load_model, device=settings.device, weights=settings.weights)
            names = ("aligner", "memory", "num_recalled", "cache_dtype")
            page = build(models, load, **{name: getattr(settings, name) for name in names})
            app = application(page)
        serve(app, at)
