"""Rows of pretraining: text of corpora with shares, in token files."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.data_gen.corpora import token_pieces
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_whole
from kvalign.training.settings import PretrainSettings


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
