"""The `network` kind: the paper's networks, trained on recorded caches."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.foundation import progress
from kvalign.foundation.folders import beside, recording_or_default
from kvalign.foundation.settings import (
    DEFAULT_MODEL,
    MOST_PROCESSES,
    MOST_RATE,
    MOST_ROWS,
    keywords_of,
    option,
)
from kvalign.training.settings import NetworkSizes, TrainSettings


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(NetworkSizes, TrainSettings):
    """Train the paper's networks on recorded caches; run the same command again to resume.

    With --aligner-kind table an aligner is trained on a model and text instead: a minute, no
    recording, and it does not drift.

    Example:
        kvalign train --data caches --max-steps 200 --out my-network
    """

    data: Path | None = option(
        None, help="folder of recorded caches (default: the newest of --model, by kvalign gen-data)"
    )
    model: str | None = option(
        None, help=f"base model of the caches (default: {DEFAULT_MODEL}, or that of --data)"
    )
    batch_size: int = option(
        1024, help="rows per step on each device", at_least=1, at_most=MOST_ROWS
    )
    lr: float = option(7e-4, help="learning rate", above=0, at_most=MOST_RATE)
    weight_decay: float = option(0.01, help="weight decay of AdamW", at_least=0, at_most=MOST_RATE)
    max_epochs: int = option(3, help="epochs at most", at_least=1)
    max_steps: int | None = option(None, help="steps at most (default: no limit)", at_least=1)
    vals_per_epoch: int = option(5, help="validation reports per epoch", at_least=1)
    patience: int = option(5, help="reports without a better loss before it stops", at_least=1)
    devices: int = option(1, help="number of devices", at_least=1, at_most=MOST_PROCESSES)
    resume: bool = option(True, help="resume an unfinished run of the same settings")

    def folder(self, kind: str) -> Path:
        recording = recording_or_default(self.data, self.model or DEFAULT_MODEL)
        return self.out or beside(recording, kind)


@keywords_of(NetworkSettings)
def train_network(settings: NetworkSettings) -> dict[str, dict[str, Any]]:
    """Train networks for keys, values or both, and save the aligner in `out`; then stream the text
    that follows what was recorded, and keep those that streams gain by.

    An interrupted run goes on at its last validation report when it is called again; what is in
    the aligner by the same settings and data is not trained anew.

    Returns:
        for `key` and `value` what the aligner's config and card say: `val_loss` and
        `input_label_mse` (mean squared errors per number, realigned and as they are), `ratio` of
        the two, `used` (a network that does no better than none is saved as one that adds
        nothing), `judged` and `val_nll` (what `kvalign.training.judge.judge` says; neither without
        `judge`, or where there is nothing to judge by), steps, seconds, settings, data; empty on
        devices other than the first.

    Raises:
        NotFoundError: no recorded data.
        ExistsError: `out` holds a network of other settings or data, or another unfinished run,
            and `overwrite` is not set.
        UserError: data of another model, unfinished data, an aligner in `out` that cannot take
            another network, a loss that is not finite.
    """
    from kvalign.training.network_judge import judge_networks
    from kvalign.training.network_run import networks_in, train

    # The processes of other devices are started by the one that shows the progress.
    with nullcontext() if "LOCAL_RANK" in os.environ else progress.shown_as("train"):
        done = train(settings)
    if not done or not settings.judge:
        return done
    out = settings.folder("network")
    judge_networks(out, settings.accelerator)
    return {kv: networks_in(out)[kv] for kv in settings.kvs}


SETTINGS, train = NetworkSettings, train_network
