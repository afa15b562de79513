"""`kvalign aligners`: aligners at hand."""

from dataclasses import dataclass

from kvalign.foundation.settings import Settings


@dataclass(frozen=True, kw_only=True)
class AlignersSettings(Settings):
    """List the shipped aligners and those of the hub's cache: for which model, of which kind,
    trained on what. What --aligner takes, beside the folder of one.

    Example:
        kvalign aligners
    """


SETTINGS = AlignersSettings


def run(settings: AlignersSettings, as_json: bool) -> None:
    from kvalign.app.inventory.listing import aligners, show

    show(as_json, aligners=aligners())
