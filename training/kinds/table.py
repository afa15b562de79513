"""Kind `table`: the mean and the scale of keys and values at each position."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalign.foundation.settings import MOST_RATE, keywords_of, option
from kvalign.training.settings import TextSettings

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TableSettings(TextSettings):
    """Train position tables, the mean and the scale of keys and values at each position, on text.

    It takes a minute, and errors do not accumulate. The paper's networks are trained on recorded
    caches (`kvalign gen-data`): use --aligner-kind network, which --target and --data imply.

    Example:
        kvalign train --aligner-kind table --num-tokens 20000 --chunk-len 64 --out my-aligner
    """

    objective: str = option(
        "mse",
        help="mse: against re-encoding; nll: the LM's own loss on the text; kl: divergence from "
        "the LM that re-encodes at each step; context: divergence from the LM that sees its whole "
        "context; projected: no training, the layers' projections of the position embeddings",
        choices=("mse", "nll", "kl", "context", "projected"),
    )
    init: str = option(
        "means",
        help="start from means and scales over the text, from nothing, or from the table in an "
        "aligner's folder, shipped name or hub id",
    )
    lr: float = option(
        2e-3, help="learning rate; mse and projected take no steps", above=0, at_most=MOST_RATE
    )
    max_steps: int = option(300, help="steps; mse and projected take none", at_least=1)


@keywords_of(TableSettings)
def train_table(
    settings: TableSettings, *, loaded: "LoadedModel | None" = None
) -> dict[str, dict[str, Any]]:
    """Train position tables with `objective`, and save the aligner in `out`; results and errors are
    those of `kvalign.training.text_run.train_on_text`.
    """
    from kvalign.training.table_run import fit
    from kvalign.training.text_run import train_on_text

    idle = sorted({"lr", "max_steps", "seed"} & settings.changed().keys())
    if settings.objective in ("mse", "projected") and idle:
        what = "%s has no effect with --objective %s, which has no steps"
        log.warning(what, ", ".join(idle), settings.objective)
    return train_on_text(fit, settings, loaded)


SETTINGS, train = TableSettings, train_table
