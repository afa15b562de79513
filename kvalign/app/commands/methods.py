"""`kvalign methods`: ways to stream, and to choose what goes."""

from dataclasses import dataclass

from kvalign.foundation.settings import Settings


@dataclass(frozen=True, kw_only=True)
class MethodsSettings(Settings):
    """List the ways to stream: what --method takes, and what --policy does.

    Example:
        kvalign methods
    """


SETTINGS = MethodsSettings


def run(settings: MethodsSettings, as_json: bool) -> None:
    from kvalign.app.inventory.listing import methods, policies, show

    show(as_json, methods=methods(), policies=policies())
