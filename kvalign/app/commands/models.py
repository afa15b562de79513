"""`kvalign models`: models at hand, and the architectures that are supported."""

from dataclasses import dataclass

from kvalign.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ModelsSettings(Settings):
    """List the shipped models and those of the hub's cache that KV-Align can stream, then the
    architectures that it knows, each with how it encodes positions.

    Example:
        kvalign models
    """


SETTINGS = ModelsSettings


def run(settings: ModelsSettings, as_json: bool) -> None:
    from kvalign.app.listing import architectures, models, show

    show(as_json, models=models(), architectures=architectures())
