"""Rows of pretraining: text of corpora with shares, in token files, or facts and questions."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.data_gen.corpora import token_pieces
from kvalign.data_gen.facts import FactStreams
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_whole
from kvalign.training.settings import PretrainSettings
from kvalign.training.text import row_ages

NO_LABEL = -100  # what torch's cross entropy leaves out
NUM_EVAL_ROWS = 2000
NUM_EIGHTHS = 8


@dataclass(frozen=True)
class Rows:
    """Rows of a step: ids and labels [B, T] int64, and the position of the first token."""

    ids: Tensor
    labels: Tensor
    first: int = 0

    def on(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, labels and position ids [1, T] on a device."""
        positions = self.first + torch.arange(self.ids.shape[1])[None]
        return self.ids.to(device), self.labels.to(device), positions.to(device)


@dataclass(frozen=True)
class TokenMix:
    """Tokenised corpora, [num_tokens] uint16 or uint32 memory-mapped, with their shares of rows."""

    ids: list[np.ndarray]
    shares: np.ndarray
    short_by: ClassVar[int] = 2

    def batch(self, seed: int, step: int, num_rows: int, row_len: int) -> Rows:
        """Rows of `row_len` tokens from random places: the same for the same seed and step."""
        rng = np.random.default_rng((seed, step))
        rows = []
        for which in rng.choice(len(self.ids), num_rows, p=self.shares):
            start = rng.integers(0, len(self.ids[which]) - row_len)
            rows.append(self.ids[which][start : start + row_len + 1].astype(np.int64))
        ids = torch.from_numpy(np.stack(rows))
        return Rows(ids[:, :-1], ids[:, 1:])


class RecallRows:
    """Rows of the corpus `recall`, endless streams of facts and questions, with the loss of answers
    only. The input of a step depends only on the seed and the step.

    Rows begin anywhere in a stream. If all rows began alike, a model would learn the contents of
    each position, and an aligner trained on its entries would carry content. The first, short rows
    lie at random positions, so that all positions are trained from the beginning.
    """

    short_by = 4

    def __init__(self, context_len: int):
        self.context_len = context_len

    def batch(self, seed: int, step: int, num_rows: int, row_len: int) -> Rows:
        """Rows of streams whose questions are for facts within a row."""
        stream = FactStreams((seed, step), num_rows, row_len, ask_oldest=True)
        ids = torch.from_numpy(stream.take(row_len + 1))
        rng = np.random.default_rng((seed, step, 1))
        first = int(rng.integers(self.context_len - row_len, endpoint=True))
        labels = ids.masked_fill(row_ages(ids) == 0, NO_LABEL)
        return Rows(ids[:, :-1], labels[:, 1:], first)


def parse_mix(specs: tuple[str, ...]) -> dict[str, float]:
    """Corpora and their shares, which add up to 1, from `SPEC` or `SPEC@WEIGHT` each."""
    weights = {}
    for spec in specs:
        name, at, weight = spec.rpartition("@")
        try:
            weights[name if at else spec] = float(weight) if at else 1.0
        except ValueError:
            raise UserError(f"--corpus takes SPEC or SPEC@WEIGHT, got {spec!r}") from None
    if not all(0 < weight < float("inf") for weight in weights.values()):
        raise UserError(f"--corpus weights must be above 0, got {', '.join(specs)}")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def open_mix(
    settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase, work_dir: Path
) -> TokenMix:
    """Tokenise each corpus once into a file of `work_dir`, and open the files.

    Raises:
        UserError: a corpus shorter than one row.
    """
    mix = parse_mix(settings.corpus)
    vocabulary = tokenizer.get_vocab()
    fingerprint = hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest()
    dtype = np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32
    ids = []
    for spec in mix:
        name = hashlib.sha256(f"{spec} {fingerprint}".encode()).hexdigest()[:16]
        path = work_dir / f"{name}.npy"
        if not path.exists():
            progress.phase(f"reading {spec}")
            read = token_pieces(spec, tokenizer, "train", torch.get_num_threads())
            pieces = [np.array(piece, dtype) for piece in read]
            write_whole(path, partial(np.save, arr=np.concatenate([np.array([], dtype), *pieces])))
        ids.append(np.load(path, mmap_mode="r"))
        if len(ids[-1]) <= settings.context_len:
            raise UserError(
                f"corpus {spec!r} is too short: it has {len(ids[-1])} tokens, more than "
                f"--context-len {settings.context_len} are needed: name a longer text, or lower "
                "--context-len"
            )
    return TokenMix(ids, np.array(list(mix.values())))


@torch.no_grad()
def accuracy_by_age(model: PreTrainedModel, context_len: int, seed: int = 1) -> list[float]:
    """Share of right answers in rows of `context_len` tokens, each read whole, by the age of the
    fact: up to an eighth of the context length, up to two, ...
    """
    streams = FactStreams(seed, NUM_EVAL_ROWS, context_len, ask_oldest=True)
    ids = torch.from_numpy(streams.take(context_len))
    right, total = torch.zeros(2, NUM_EIGHTHS, dtype=torch.float32)
    for rows in ids.split(16):
        logits = model(input_ids=rows.to(model.device), use_cache=False).logits
        hits = (logits[:, :-1].argmax(-1).cpu() == rows[:, 1:]).float()
        age = row_ages(rows)[:, 1:]
        of = (age[age > 0] * NUM_EIGHTHS - 1) // context_len
        right.index_add_(0, of, hits[age > 0])
        total.index_add_(0, of, torch.ones(len(of), dtype=torch.float32))
    return (right / total).tolist()
