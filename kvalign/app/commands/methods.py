"""`kvalign methods`: ways to stream."""

from dataclasses import dataclass

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class MethodsSettings(Settings):
    """List the ways to stream: what --method takes.

    Example:
        kvalign methods
    """

    json: bool = option(False, help="print one JSON document")


def run(settings: MethodsSettings) -> None:
    from kvalign.app.listing import methods, show

    show(settings.json, methods=methods())
