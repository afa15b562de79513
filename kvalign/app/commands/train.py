"""`kvalign train`: train an aligner on recorded caches."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Train an aligner; run the same command again to resume a network.

    `table` is the mean and the scale of keys and values at each position: it takes a model and
    text, a minute, and does not drift. `network` is the paper's and takes recorded caches.

    Example:
        kvalign train --aligner-kind table --num-tokens 20000 --chunk-len 64 --out my-aligner
    """

    out: Path = option(help="folder of the aligner")
    aligner_kind: str = option(
        "network", help="what to train", choices=("network", "table", "anchored")
    )
    data: Path | None = option(
        None, help="network: folder of recorded caches, from kvalign gen-data"
    )
    model: str = option("gpt2-mini", help="table: shipped name, hub id or folder of a causal LM")
    corpus: tuple[str, ...] = option(
        ("python-docs",), help="table: text, comma-separated; each gives an equal share"
    )
    num_tokens: int = option(300_000, help="table: tokens of text", at_least=1)
    chunk_len: int = option(
        256, help="table: positions; caches up to this less one can be aligned", at_least=8
    )
    objective: str = option(
        "mse",
        help="mse: against re-encoding; table only: nll, the LM's own loss on the text, or kl, to "
        "the LM that re-encodes at each step",
        choices=("mse", "nll", "kl"),
    )
    init: str = option(
        "means",
        help="table: start from means and scales over the text, from none, or from the table in an "
        "aligner's folder, shipped name or hub id",
    )
    target: str = option("both", help="vectors to realign", choices=("key", "value", "both"))
    key_hidden1: int = option(256, help="first hidden size of the network for keys", at_least=1)
    key_hidden2: int = option(64, help="second hidden size of the network for keys", at_least=1)
    value_hidden1: int = option(64, help="first hidden size of the network for values", at_least=1)
    value_hidden2: int = option(
        128, help="second hidden size of the network for values", at_least=1
    )
    position_dim: int = option(32, help="size of the position embedding", at_least=1)
    layer_dim: int = option(8, help="size of the layer embedding", at_least=1)
    head_embed_dim: int = option(4, help="size of the head embedding", at_least=1)
    batch_size: int = option(1024, help="rows a step on each device", at_least=1)
    lr: float | None = option(
        None, help="learning rate (default: network 7e-4, table 2e-3)", above=0
    )
    weight_decay: float = option(0.01, help="weight decay of AdamW", at_least=0)
    max_epochs: int = option(3, help="epochs at most", at_least=1)
    max_steps: int | None = option(
        None, help="steps at most (default: network no limit, table 300)", at_least=1
    )
    vals_per_epoch: int = option(5, help="validation reports an epoch", at_least=1)
    patience: int = option(
        5, help="reports without a better validation loss before it stops", at_least=1
    )
    accelerator: str = option("auto", help="what to train on", choices=("cpu", "auto", "gpu"))
    devices: int = option(1, help="number of devices", at_least=1)
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0)
    seed: int = option(0, help="random seed", at_least=0)
    resume: bool = option(True, help="resume an unfinished run of the same settings (default: yes)")
    overwrite: bool = option(False, help="replace what is in --out")
    json: bool = option(False, help="print one JSON document")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aligner_kind == "network" and self.data is None:
            raise ValueError("--data is needed: record caches with kvalign gen-data first")
        if self.aligner_kind == "network" and self.objective != "mse":
            raise ValueError(
                f"--objective {self.objective} is for --aligner-kind table: the network is "
                f"trained on "
                "recorded caches, without the LM"
            )


def run(settings: TrainSettings) -> None:
    import json

    if settings.aligner_kind == "network":
        from kvalign.training.network_run import train
    else:
        from kvalign.training.table_run import train

    results = train(settings)
    if settings.json and results:
        print(json.dumps(results))
        return
    for target, found in results.items():
        ratio = "none" if found["ratio"] is None else f"{found['ratio']:.4f}"
        print(
            f"{target}: val loss {found['val_loss']:.6g}, "
            f"input-label MSE {found['input_label_mse']:.6g}, "
            f"ratio {ratio} (lower is better; 1 leaves entries as they are)"
            + ("" if found["used"] else "; not used: entries stay as they are")
        )
