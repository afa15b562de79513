"""The `anchored` kind: position tables, and networks on the entry as it was born."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalign.settings import keywords_of, option
from kvalign.training.kinds.table import TableSettings
from kvalign.training.settings import NetworkSizes

if TYPE_CHECKING:
    from kvalign.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class AnchoredSettings(NetworkSizes, TableSettings):
    """Train position tables, then a network that adds to them, on text.

    Example:
        kvalign train --aligner-kind anchored --num-tokens 20000 --chunk-len 64 --max-steps 50 --out my-anchored
    """  # noqa: E501

    lr: float = option(2e-3, help="learning rate, of nll and kl too", above=0)
    max_steps: int = option(300, help="steps, of nll and kl too", at_least=1)


@keywords_of(AnchoredSettings)
def train_anchored(
    settings: AnchoredSettings, *, loaded: "LoadedModel | None" = None
) -> dict[str, dict[str, Any]]:
    """Train position tables as `train_table` does, then networks beside them, and save the aligner
    in `out`.

    Returns:
        for `key` and `value` what `train_table` says; the tables alone decide `used`.

    Raises:
        ExistsError: `out` holds an aligner, and `overwrite` is not set.
        UserError: as of `train_table`.
    """
    from kvalign.training.anchored_run import train

    return train(settings, loaded)


SETTINGS, train = AnchoredSettings, train_anchored
