"""`kvalign methods`: ways to stream."""

from dataclasses import dataclass

from kvalign.settings import Settings


@dataclass(frozen=True, kw_only=True)
class MethodsSettings(Settings):
    """List the ways to stream: what --method takes.

    Example:
        kvalign methods
    """


SETTINGS = MethodsSettings


def run(settings: MethodsSettings, as_json: bool) -> None:
    from kvalign.app.listing import methods, show

    show(as_json, methods=methods())
