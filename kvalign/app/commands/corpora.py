"""`kvalign corpora`: texts to train and evaluate on."""

from dataclasses import dataclass

from kvalign.foundation.settings import Settings


@dataclass(frozen=True, kw_only=True)
class CorporaSettings(Settings):
    """List the texts to train and evaluate on: what --corpus takes.

    Example:
        kvalign corpora
    """


SETTINGS = CorporaSettings


def run(settings: CorporaSettings, as_json: bool) -> None:
    from kvalign.app.inventory.listing import corpora, show

    show(as_json, corpora=corpora())
