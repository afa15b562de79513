"""Kind `network`: the paper's networks, trained on recorded caches."""

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
from kvalign.training.settings import NetworkSizes, TrainSettings, kind_of


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(NetworkSizes, TrainSettings):
    """Train the paper's networks on recorded caches; run the same command again to resume.

    --aligner-kind table trains an aligner on a model and text instead: in a minute, without a
    recording, and its errors do not accumulate.

    Example:
        kvalign train --data caches --max-steps 200 --out my-network
    """

    aligner_kind: str = kind_of("network")
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
    max_steps: int | None = option(None, help="most steps (default: no limit)", at_least=1)
    vals_per_epoch: int = option(5, help="validation reports per epoch", at_least=1)
    patience: int = option(5, help="reports without a better loss before it stops", at_least=1)
    devices: int = option(1, help="number of devices", at_least=1, at_most=MOST_PROCESSES)
    resume: bool = option(True, help="resume an unfinished run of the same settings")

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
        nothing can be judged), steps, seconds, settings, data. Empty on devices other than the
        first.

    Raises:
        NotFoundError: no recorded data.
        ExistsError: `out` has a network of other settings or data, or another unfinished run, and
            `overwrite` is not set.
        UserError: data of another model, unfinished data, a network in `out` that no other can
            join, a non-finite loss, a launcher that starts the command several times.
    """
    from kvalign.foundation.files import locked
    from kvalign.foundation.runs import keeping
    from kvalign.training.aligner_folder import save
    from kvalign.training.network_devices import is_helper, leading
    from kvalign.training.network_judge import judge_networks
    from kvalign.training.network_run import networks_in, train

    out = settings.folder
    if is_helper():
        train(settings)
        return {}
    with leading(), progress.shown_as("train"):
        aligner = train(settings)
    if aligner is not None:
        with locked(out), keeping(lambda: f"trained networks are kept in {out / 'training'}"):
            if settings.judge:
                judge_networks(aligner, settings.accelerator)
            if networks_in(out) != aligner.config.training:
                save(aligner, out)
    records = networks_in(out)
    return {kv: records[kv] for kv in settings.kvs}


SETTINGS, train = NetworkSettings, train_network
