"""Settings of training; `kinds.py` has those of a single kind of aligner."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvalign.aligners.kinds import TARGETS
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
    flag,
    like,
    option,
)
from kvalign.methods.registry import AUTO

HEAD_DIM = 64  # of a reference language model
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

    @property
    def folder(self) -> Path:
        return self.out or folder_of(self.model) / of_corpus(self.aligner_kind, self.corpus)


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
class PretrainSettings(Settings):
    """Train a small reference language model, from scratch or from the weights of another one.

    Run the same command again to resume.

    Example:
        kvalign pretrain --arch gpt2 --out my-gpt2 --num-tokens 4096 --vocab-size 512
    """

    arch: str = option(
        "gpt2",
        help="architecture: gpt2 has learned positions, llama rotary ones, mpt ALiBi",
        choices=("gpt2", "llama", "mpt"),
    )
    corpus: tuple[str, ...] = option(
        ("python-docs",),
        help="corpora, each SPEC or SPEC@WEIGHT; recall alone: facts and questions",
    )
    out: Path = option(help="folder of the model", writes="folder")
    tokenizer: Path | None = option(
        None, help="folder or shipped name of a model whose tokenizer to use (default: a new one)"
    )
    init: Path | None = option(
        None,
        help="folder or shipped name of a model to begin with: its weights and tokenizer; the "
        "sizes must be the same (default: random weights)",
    )
    vocab_size: int = option(
        8192, help="tokens of a new tokenizer", at_least=257, at_most=MOST_ROWS
    )
    sink_token: bool = option(
        False, help="put a new, trained token before every row, as an attention sink"
    )
    context_len: int = option(512, help="context length in tokens", at_least=16, at_most=MOST_ROWS)
    num_layers: int = option(6, help="transformer layers", at_least=1, at_most=MOST_SIZE)
    hidden_size: int = option(
        256, help="hidden size; heads have 64 dimensions", at_least=HEAD_DIM, at_most=MOST_SIZE
    )
    num_tokens: int = option(8_000_000, help="tokens to train on", at_least=1)
    max_minutes: float | None = option(
        None,
        help="most minutes of training; the shares below are then of these, if they end before "
        "the steps do (default: no limit)",
        above=0,
        at_most=MOST_RATE,
    )
    batch_size: int = option(
        4, help="sequences of the full context length per step", at_least=1, at_most=MOST_ROWS
    )
    lr: float = option(
        2e-3, help="peak learning rate of AdamW (all other weights)", above=0, at_most=MOST_RATE
    )
    matrix_lr: float = option(
        4e-3, help="peak learning rate of Muon (weight matrices)", above=0, at_most=MOST_RATE
    )
    decay_share: float = option(
        0.5, help="last share of the steps, in which the rate falls to 0", above=0, at_most=1
    )
    short_share: float = option(
        0.4,
        help="first share of the steps, with rows of half the context length (an eighth, with "
        "--repeat-share or --rename-share)",
        at_least=0,
        at_most=1,
    )
    repeat_share: float = option(
        0.0,
        help="share of the rows in which a passage occurs twice; it falls to 0 at 0.8 of the steps",
        at_least=0,
        at_most=1,
    )
    rename_share: float = option(
        0.0,
        help="share of the rows in which rare tokens trade places; it falls likewise",
        at_least=0,
        at_most=1,
    )
    copy_weight: float = option(
        0.0,
        help="weight of a loss that trains four heads to copy what occurred before; it falls "
        "likewise",
        at_least=0,
        at_most=MOST_RATE,
    )
    save_minutes: float = option(
        4.0, help="minutes between checkpoints", above=0, at_most=MOST_RATE
    )
    eval_corpus: str | None = option(None, help="corpus for the reported bits per byte")
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0, at_most=MOST_THREADS)
    compile: bool = option(False, help="use torch.compile (needs a C++ compiler; faster)")
    device: str = option("auto", help="cpu, cuda; auto: cuda if there is one")
    seed: int = option(0, help="random seed", at_least=0, at_most=MOST_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % HEAD_DIM:
            raise UserError(
                f"--hidden-size must be a multiple of {HEAD_DIM}, got {self.hidden_size}"
            )
        if self.init and self.tokenizer:
            raise UserError("--init brings its own tokenizer: leave out --tokenizer")
        for name in ("repeat_share", "rename_share", "copy_weight"):
            if self.max_minutes and getattr(self, name):
                raise UserError(f"{flag(name)} falls by steps: leave it out, or --max-minutes")
        if self.copy_weight and self.num_layers < 2:
            raise UserError(f"--copy-weight needs --num-layers 2 or more, got {self.num_layers}")

    @property
    def tokens_a_step(self) -> int:
        """Tokens of a step, of short rows too."""
        return self.batch_size * self.context_len

    @property
    def num_steps(self) -> int:
        return math.ceil(self.num_tokens / self.tokens_a_step)

    @property
    def is_recall(self) -> bool:
        """Return whether the corpus is facts and questions, with tokens and labels of its own."""
        return self.corpus == ("recall",)


@dataclass(frozen=True, kw_only=True)
class TuneMemorySettings(ModelSettings):
    """Measure which layers of a model should take entries back from a memory, how loud these should
    be, and where they should lie. Later streams with a --memory do so.

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
