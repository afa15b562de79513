"""Settings of the training of aligners, and of what goes with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvalign.aligners.kinds import NETWORK_SIZES, TARGETS
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.folders import (
    DEFAULT_CORPUS,
    beside,
    folder_of,
    of_corpus,
    recording_or_default,
)
from kvalign.foundation.settings import (
    DEFAULT_MODEL,
    MOST_PROCESSES,
    MOST_RATE,
    MOST_ROWS,
    MOST_SEED,
    MOST_SIZE,
    MOST_THREADS,
    OF_WEIGHTS,
    WEIGHTS,
    ModelSettings,
    Settings,
    like,
    option,
)
from kvalign.methods.registry import AUTO

SMALL, LARGE = 64, 256
"""Caches that a memory is measured with, if the context length is long enough for them."""


def device_of(accelerator: str) -> str:
    """Device of a model, by Lightning's name for what to train on."""
    return "cuda" if accelerator == "gpu" else accelerator


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Base of the settings of `kvalign train`; a subclass says of which kind of aligner."""

    aligner_kind: ClassVar[str]
    out: Path | None = option(
        None,
        help="folder of the aligner (default: kvalign-data/MODEL/KIND, for another corpus "
        "KIND-CORPUS; or beside --data)",
        writes="folder",
    )
    target: str = option("both", help="vectors to realign", choices=("key", "value", "both"))
    accelerator: str = option("auto", help="what to train on", choices=("cpu", "auto", "gpu"))
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0, at_most=MOST_THREADS)
    seed: int = option(0, help="random seed", at_least=0, at_most=MOST_SEED)
    overwrite: bool = option(False, help="replace the files in --out")
    judge: bool = option(
        True, help="--no-judge: keep everything that was trained, even if it does not help streams"
    )

    @property
    def kvs(self) -> tuple[str, ...]:
        return TARGETS if self.target == "both" else (self.target,)

    @property
    def folder(self) -> Path:
        raise NotImplementedError

    def command_line(self, command: str, leave_out: tuple[str, ...] = ()) -> str:
        return super().command_line(f"{command} {self.aligner_kind}", leave_out)


@dataclass(frozen=True, kw_only=True)
class TextSettings(TrainSettings):
    """Base of the settings of kinds that are trained on a model and text."""

    model: str = option(DEFAULT_MODEL, help="shipped name, hub id or folder of a causal LM")
    corpus: tuple[str, ...] = option(DEFAULT_CORPUS, help="text, comma-separated; equal shares")
    num_tokens: int = option(
        300_000,
        help="tokens of text; the progress bar counts a token each time that it is computed",
        at_least=1,
    )
    chunk_len: int = option(
        256,
        help="positions; the aligner fits caches up to this less one",
        at_least=8,
        at_most=MOST_ROWS,
    )
    place: bool = option(
        True,
        help="--no-place: tables on learned positions compute a full cache at the position of its "
        "size, not where text is measured to do best",
    )

    @property
    def folder(self) -> Path:
        return self.out or folder_of(self.model) / of_corpus(self.aligner_kind, self.corpus)


def _size(name: str, help: str) -> int:
    return option(NETWORK_SIZES[name], help=help, at_least=1, at_most=MOST_SIZE)


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


@dataclass(frozen=True, kw_only=True)
class TuneSettings(Settings):
    """Train a network with many settings, stop bad ones early, then train the best one completely.

    The search space is that of the paper's table 1. Run the same command again to resume a sweep.

    Example:
        kvalign tune --target key --data caches --out sweep --num-trials 10
    """

    target: str = option(help="vectors to realign", choices=("key", "value"))
    data: Path | None = option(
        None, help="folder of recorded caches (default: the newest of --model, by kvalign gen-data)"
    )
    model: str = option(DEFAULT_MODEL, help="base model of the caches, if --data is not given")
    out: Path | None = option(
        None,
        help="folder of the sweep; OUT/aligner is its best aligner (default: "
        "kvalign-data/MODEL/sweep-TARGET, or beside --data)",
        writes="folder",
    )
    num_trials: int = option(10, help="trials", at_least=1)
    max_epochs: int = option(3, help="most epochs of a trial", at_least=1)
    vals_per_epoch: int = option(5, help="validation reports per epoch", at_least=1)
    max_steps: int | None = option(None, help="steps of a trial (default: no limit)", at_least=1)
    hidden_sizes: tuple[int, ...] = option(
        (32, 64, 128, 256),
        help="sizes of either hidden layer, comma-separated",
        at_least=1,
        at_most=MOST_SIZE,
    )
    min_batch_size: int = option(
        32, help="fewest rows per step; a power of two", at_least=1, at_most=MOST_ROWS
    )
    max_batch_size: int = option(16384, help="most rows per step", at_least=1, at_most=MOST_ROWS)
    grace_reports: int = option(
        2, help="reports before a trial that falls behind may be stopped (ASHA)", at_least=1
    )
    reduction_factor: float = option(
        2, help="one in this many trials continues", above=1, at_most=MOST_RATE
    )
    num_concurrent: int | None = option(
        None,
        help="trials at once; the first is never stopped (default: by CPUs)",
        at_least=1,
        at_most=MOST_PROCESSES,
    )
    gpus_per_trial: float = option(
        0, help="GPUs for each trial", at_least=0, at_most=MOST_PROCESSES
    )
    ray_address: str | None = option(None, help="Ray cluster (default: start one here)")
    seed: int = option(
        0, help="random seed, of the draws and of each trial", at_least=0, at_most=2**32 - 1
    )
    overwrite: bool = option(False, help="replace another sweep in --out")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (low := self.min_batch_size) > (high := self.max_batch_size):
            raise UserError(f"--min-batch-size {low} is above --max-batch-size {high}")
        if self.min_batch_size & (self.min_batch_size - 1):
            raise UserError(f"--min-batch-size must be a power of two, got {self.min_batch_size}")

    @property
    def folder(self) -> Path:
        return self.out or beside(
            recording_or_default(self.data, self.model), f"sweep-{self.target}"
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        num_doublings = (self.max_batch_size // self.min_batch_size).bit_length()
        return tuple(self.min_batch_size << n for n in range(num_doublings))


@dataclass(frozen=True, kw_only=True)
class TuneMemorySettings(ModelSettings):
    """Measure which layers of a model should take entries back from a memory, as few as are as good
    as all, with which bias of their scores, and where these should lie. Later streams with a
    --memory do so.

    The result goes into the folder of your aligner, else into your cache folder (KVALIGN_CACHE
    moves it). For the shipped models and smollm2-135m-instruct it is there.

    Example:
        kvalign tune-memory --model llama-mini --cache-sizes 32 --num-tokens 1000
    """

    weights: str = option("auto", help=OF_WEIGHTS, choices=WEIGHTS)
    method: str = option(AUTO, help="a method that takes a memory; auto: the model's")
    aligner: str | None = option(None, help="aligner of kvalign (default: the model's)")
    corpus: str = option(DEFAULT_CORPUS[0], help="text that the model was not trained on")
    num_tokens: int = option(4000, help="tokens of it that are streamed", at_least=300)
    num_questions: int = option(
        100, help="of a model that was trained on facts: questions of each age", at_least=10
    )
    cache_sizes: tuple[int, ...] | None = option(
        None,
        help="caches, comma-separated (default: an eighth and a half of the context length, at "
        f"most {SMALL} and {LARGE})",
        at_least=8,
    )
    memory: int = like(CacheSizes, "memory", 100_000, more="", at_least=1)
    layers: tuple[str, ...] | None = option(
        None,
        help="another way that is measured, as of --recall-layers; may be repeated",
        repeats=True,
    )
    quick: bool = option(
        False, help="measure only whether the usual way helps, with the smaller cache"
    )
    out: Path | None = option(None, help="file of the plan (default: see above)", writes="file")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """Judge an aligner by streams of held-out text, and save a copy with the parts that help.

    kvalign train does the same to what it trains, unless it is told --no-judge. The copy keeps
    where it is worse than discard-half, which --method auto then takes.

    Example:
        kvalign judge --aligner my-network --out my-network-judged
    """

    aligner: str = option(help="shipped name, folder or hub id of an aligner")
    out: Path = option(help="folder of the judged aligner", writes="folder")
    corpus: tuple[str, ...] | None = option(
        None,
        help="text to stream, comma-separated; of a text that the aligner was made from, what "
        "follows (default: that text)",
    )
    accelerator: str = option("auto", help="what to stream on", choices=("cpu", "auto", "gpu"))
    overwrite: bool = option(False, help="replace the aligner in --out")


@dataclass(frozen=True, kw_only=True)
class ImportPublishedSettings(Settings):
    """Make an aligner from the two files that the authors of KV-Align publish for a model.

    They are in `models/` of github.com/eecs585projectorg/kv-align, for DistilGPT2 and SmolLM2-135M.

    Example:
        kvalign import-published --keys keys_network_distilgpt2.pth --values values_network_distilgpt2.pth --model distilbert/distilgpt2 --out published
    """  # noqa: E501

    keys: Path = option(help="file of the network for keys")
    values: Path = option(help="file of the network for values")
    model: str = option(help="hub id or folder of the base model that they were trained for")
    out: Path = option(help="folder of the aligner", writes="folder")
    num_sinks: int = option(
        4, help="first entries that are never evicted (the authors': 4)", at_least=0
    )
    chunk_len: int = option(
        256,
        help="the aligner fits caches up to this less one (the authors': 256)",
        at_least=2,
        at_most=MOST_ROWS,
    )
    overwrite: bool = option(False, help="replace the aligner in --out")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_len < self.num_sinks + 2:
            raise UserError(
                f"--chunk-len must be above --num-sinks + 1 ({self.num_sinks + 1}): no entry is "
                f"left to align, got {self.chunk_len}"
            )
