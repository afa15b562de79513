"""`kvalign models`: models at hand, and the architectures that are supported."""

from dataclasses import dataclass

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ModelsSettings(Settings):
    """List the shipped models and those of the hub's cache that KV-Align can stream, then the
    architectures that it knows, each with how it encodes positions.

    Example:
        kvalign models
    """

    json: bool = option(False, help="print one JSON document")


def run(settings: ModelsSettings) -> None:
    from kvalign.app.listing import architectures, models, show

    show(settings.json, models=models(), architectures=architectures())
