"""`kvalign tune`: sweep the sizes and the learning rate of one network."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class TuneSettings(Settings):
    """Train a network with many settings, stop the bad ones early, then train the best one whole.

    The space is that of the paper's table 1. Run the same command again to resume a sweep.

    Example:
        kvalign tune --target key --data caches --out sweep --num-trials 10
    """

    target: str = option(help="vectors to realign", choices=("key", "value"))
    data: Path = option(help="folder of recorded caches, from kvalign gen-data")
    out: Path = option(help="folder of the sweep; OUT/aligner is its best aligner")
    num_trials: int = option(10, help="trials", at_least=1)
    max_epochs: int = option(3, help="epochs of a trial at most", at_least=1)
    vals_per_epoch: int = option(5, help="validation reports an epoch", at_least=1)
    max_steps: int | None = option(
        None, help="steps of a trial at most (default: no limit)", at_least=1
    )
    hidden_sizes: tuple[int, ...] = option(
        (32, 64, 128, 256), help="sizes of either hidden layer, comma-separated", at_least=1
    )
    min_batch_size: int = option(32, help="rows a step at least; a power of two", at_least=1)
    max_batch_size: int = option(16384, help="rows a step at most", at_least=1)
    min_lr: float = option(1e-4, help="learning rate at least; drawn log-uniform", above=0)
    max_lr: float = option(1e-1, help="learning rate at most", above=0)
    search: str = option(
        "random",
        help="random, or defaults-first: the first trial has the sizes of kvalign train",
        choices=("random", "defaults-first"),
    )
    scheduler: str = option(
        "asha",
        help="asha: stop a trial that is behind the others at the same report; none: stop none",
        choices=("asha", "none"),
    )
    grace_reports: int = option(2, help="asha: reports before a trial may be stopped", at_least=1)
    reduction_factor: float = option(
        2, help="asha: of the trials at a report, one in so many goes on", above=1
    )
    num_concurrent: int | None = option(
        None,
        help="trials side by side; asha never stops the first (default: as many as CPUs allow)",
        at_least=1,
    )
    cpus_per_trial: int = option(1, help="CPUs of a trial", at_least=1)
    gpus_per_trial: float = option(0, help="GPUs of a trial", at_least=0)
    ray_address: str | None = option(None, help="Ray cluster (default: start one here)")
    seed: int = option(0, help="random seed, of the draws and of each trial", at_least=0)
    resume: bool = option(
        True, help="resume an unfinished sweep of the same settings (default: yes)"
    )
    overwrite: bool = option(False, help="replace another sweep in --out")
    json: bool = option(False, help="print one JSON document")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "lr"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            words = name.replace("_", "-")
            if low > high:
                raise ValueError(f"--min-{words} {low} is above --max-{words} {high}")
        if self.min_batch_size & (self.min_batch_size - 1):
            raise ValueError(f"--min-batch-size must be a power of two, got {self.min_batch_size}")
        num_reports = self.max_epochs * self.vals_per_epoch
        if self.scheduler == "asha" and self.grace_reports > num_reports:
            raise ValueError(
                f"--grace-reports must be at most {num_reports}, the reports of a trial, got "
                f"{self.grace_reports}"
            )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Powers of two in the range."""
        sizes = [self.min_batch_size]
        while 2 * sizes[-1] <= self.max_batch_size:
            sizes.append(2 * sizes[-1])
        return tuple(sizes)


def run(settings: TuneSettings) -> None:
    import json
    import sys

    from kvalign.training.sweep import sweep
    from kvalign.training.sweep_report import as_markdown

    try:
        result = sweep(settings)
    except RuntimeError as error:
        print(f"kvalign tune: stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    if settings.json:
        print(json.dumps(result))
        return
    best, val_loss = result["best"], result["aligner_val_loss"]
    print(
        f"{result['aligner']}: val loss {val_loss:.6g}, trained anew as trial {best['trial']}, "
        f"which had {best['val_loss']:.6g} (ratio {val_loss / best['val_loss']:.4f}); input-label "
        f"MSE {result['input_label_mse']:.6g}"
        + ("\n" if result["used"] else "; not used: entries stay as they are\n")
    )
    print(as_markdown(result["trials"]), end="")
