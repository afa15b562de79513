"""Training of each kind of aligner: its settings, from those in `kvalign.training.settings`, and a
function of them that trains and saves. If it loads a model it also takes `loaded`.

A kind that is trained on text calls `kvalign.training.text_run.train_on_text`, which does
everything except the training itself.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.aligners.kinds import NETWORK_SIZES as S
from kvalign.foundation.folders import beside, recording_or_default
from kvalign.foundation.names import Registry
from kvalign.foundation.settings import (
    DEFAULT_MODEL,
    MOST_RATE,
    MOST_ROWS,
    MOST_SIZE,
    keywords_of,
    option,
)
from kvalign.training.settings import TextSettings, TrainSettings

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel

log = logging.getLogger(__name__)

TRAINERS: Registry[Callable[..., dict[str, dict[str, Any]]]] = Registry(
    "aligner kind",
    {
        "network": "kvalign.training.kinds:train_network",
        "table": "kvalign.training.kinds:train_table",
        "table-network": "kvalign.training.kinds:train_table_network",
    },
)
"""Functions under `keywords_of` by the names in `kvalign.aligners.KINDS`."""


def _size(name: str, help: str) -> int:
    return option(S[name], help=help, at_least=1, at_most=MOST_SIZE)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(TrainSettings):
    """Train the paper's networks on recorded caches; run the same command again to resume.

    kvalign train table needs a model and text instead: it takes a minute and no recording, and its
    errors do not accumulate.

    Example:
        kvalign train network --data caches --max-steps 200 --out my-network
    """

    aligner_kind = "network"
    key_hidden1: int = _size("key_hidden1", "keys: first hidden size")
    key_hidden2: int = _size("key_hidden2", "keys: second hidden size")
    value_hidden1: int = _size("value_hidden1", "values: first hidden size")
    value_hidden2: int = _size("value_hidden2", "values: second hidden size")
    position_dim: int = _size("position_dim", "size of the position embedding")
    layer_dim: int = _size("layer_dim", "size of the layer embedding")
    head_embed_dim: int = _size("head_embed_dim", "size of the head embedding")
    data: Path | None = option(
        None, help="folder of recorded caches (default: the newest of --model, by kvalign gen-data)"
    )
    model: str | None = option(
        None, help=f"base model of the caches (default: {DEFAULT_MODEL}, or that of --data)"
    )
    batch_size: int = option(1024, help="rows per step", at_least=1, at_most=MOST_ROWS)
    lr: float = option(7e-4, help="learning rate", above=0, at_most=MOST_RATE)
    weight_decay: float = option(0.01, help="weight decay of AdamW", at_least=0, at_most=MOST_RATE)
    max_epochs: int = option(3, help="epochs at most", at_least=1)
    max_steps: int | None = option(None, help="most steps (default: no limit)", at_least=1)
    vals_per_epoch: int = option(5, help="validation reports per epoch", at_least=1)
    patience: int = option(5, help="reports without a better loss before it stops", at_least=1)

    @property
    def folder(self) -> Path:
        recording = recording_or_default(self.data, self.model or DEFAULT_MODEL)
        return self.out or beside(recording, self.aligner_kind)


@keywords_of(NetworkSettings)
def train_network(settings: NetworkSettings) -> dict[str, dict[str, Any]]:
    """Train networks for keys, values or both, judge them by streams of the text that follows the
    recorded one, and save an aligner in `out` with those that help.

    Called again, an interrupted run continues from its last validation report. Networks in `out`
    with the same settings and data are not trained again. That of the other kv joins the aligner,
    and is judged again.

    Returns:
        for `key` and `value` the record in the aligner's config and card: `val_loss` and
        `input_label_mse` (mean squared errors per number, with and without realignment), their
        `ratio`, `used` (a network without benefit is saved as one that adds nothing), `judged` and
        `val_nll` (the result of `kvalign.training.judge.judge`; absent without `judge`, or if
        nothing can be judged), steps, seconds, settings, data.

    Raises:
        NotFoundError: no recorded data.
        ExistsError: `out` has a network of other settings or data, or another unfinished run, and
            `overwrite` is not set.
        UserError: data of another model, unfinished data, a network in `out` that no other can
            join, a non-finite loss, another run that is writing to `out`.
    """
    from kvalign.training.network_run import train_judge_save

    return train_judge_save(settings)


@dataclass(frozen=True, kw_only=True)
class TableSettings(TextSettings):
    """Train position tables, the mean and the scale of keys and values at each position, on text.

    It takes a minute, and errors do not accumulate. The paper's networks are trained on recorded
    caches (kvalign gen-data). Other kinds: kvalign train network or table-network.

    Example:
        kvalign train table --num-tokens 20000 --chunk-len 64 --out my-aligner
    """

    aligner_kind = "table"
    objective: str = option(
        "mse",
        help="mse: against re-encoding; nll: the LM's own loss on the text; kl: divergence from "
        "the LM that re-encodes at each step; context: divergence from the LM that sees its whole "
        "context; projected: no training, the layers' projections of GPT-2's position embeddings",
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


@dataclass(frozen=True, kw_only=True)
class TableNetworkSettings(TableSettings):
    """Train position tables on text, and with them, through the streaming LM, a network that
    corrects an entry once, when it is written. For learned positions.

    Example:
        kvalign train table-network --num-tokens 20000 --chunk-len 64 --max-steps 50 --out my-table-network
    """  # noqa: E501

    aligner_kind = "table-network"
    objective: str = option(
        "context",
        help="context: divergence from the LM that sees its whole context; kl: from the LM that "
        "re-encodes at each step; nll: the LM's own loss on the text",
        choices=("context", "kl", "nll"),
    )
    lr: float = option(
        1e-3,
        help="learning rate of the tables; the network's is twice that",
        above=0,
        at_most=MOST_RATE,
    )
    hidden: int = option(64, help="hidden size of the network", at_least=1, at_most=MOST_SIZE)


@keywords_of(TableNetworkSettings)
def train_table_network(
    settings: TableNetworkSettings, *, loaded: "LoadedModel | None" = None
) -> dict[str, dict[str, Any]]:
    """Train tables and a network beside them with `objective`, and save the aligner in `out`, as
    `train_table` does.
    """
    from kvalign.training.table_run import fit
    from kvalign.training.text_run import train_on_text

    return train_on_text(fit, settings, loaded)
