"""Training of each kind of aligner: a function of its settings that trains and saves. If it loads a
model it also takes `loaded`.

A kind that is trained on text calls `kvalign.training.text_run.train_on_text`, which does
everything except the training itself.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvalign.foundation.names import Registry
from kvalign.foundation.settings import keywords_of
from kvalign.training.settings import NetworkSettings, TableNetworkSettings, TableSettings

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
