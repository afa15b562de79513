"""`kvalign aligners`: aligners at hand."""

from dataclasses import dataclass

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class AlignersSettings(Settings):
    """List the shipped aligners and those of the hub's cache: for which model, of which kind,
    trained on what. What --aligner takes, beside the folder of one.

    Example:
        kvalign aligners
    """

    json: bool = option(False, help="print one JSON document")


def run(settings: AlignersSettings) -> None:
    from kvalign.app.listing import aligners, show

    show(settings.json, aligners=aligners())
