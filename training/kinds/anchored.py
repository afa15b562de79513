"""Kind `anchored`: position tables, and networks on the entry without its position."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalign.foundation.settings import keywords_of, option
from kvalign.training.kinds.table import TableSettings
from kvalign.training.settings import NetworkSizes, kind_of

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class AnchoredSettings(NetworkSizes, TableSettings):
    """Train position tables on text, then a network that adds to them.

    With --objective mse the network is trained on pairs of encodings. With kl and nll it is trained
    on streams, through the frozen model. The tables are estimated, or come from --init.

    Example:
        kvalign train --aligner-kind anchored --num-tokens 20000 --chunk-len 64 --max-steps 50 --out my-anchored
    """  # noqa: E501

    aligner_kind: str = kind_of("anchored")
    objective: str = option(
        "mse",
        help="objective of the networks. mse: pairs of encodings; nll: the LM's own loss on "
        "the text; kl: divergence from the LM that re-encodes at each step",
        choices=("mse", "nll", "kl"),
    )


@keywords_of(AnchoredSettings)
def train_anchored(
    settings: AnchoredSettings, *, loaded: "LoadedModel | None" = None
) -> dict[str, dict[str, Any]]:
    """Train position tables and networks beside them, and save the aligner in `out`, as
    `train_table` does; only the tables decide `used`.
    """
    from kvalign.training.anchored_run import fit
    from kvalign.training.text_run import train_on_text

    return train_on_text(fit, settings, loaded)


SETTINGS, train = AnchoredSettings, train_anchored
