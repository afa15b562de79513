"""Settings of the training of small reference language models."""

import math
from dataclasses import dataclass
from pathlib import Path

from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import (
    MOST_RATE,
    MOST_ROWS,
    MOST_SEED,
    MOST_SIZE,
    MOST_THREADS,
    Settings,
    flag,
    option,
)

HEAD_DIM = 64


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
