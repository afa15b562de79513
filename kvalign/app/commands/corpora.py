"""`kvalign corpora`: texts to train and evaluate on."""

from dataclasses import dataclass

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class CorporaSettings(Settings):
    """List the texts to train and evaluate on: what --corpus takes.

    Example:
        kvalign corpora
    """

    json: bool = option(False, help="print one JSON document")


def run(settings: CorporaSettings) -> None:
    from kvalign.app.listing import corpora, show

    show(settings.json, corpora=corpora())
