"""Rows that reward a model for reading far back, mixed into natural ones at first.

In a share of the rows a passage occurs a second time. In a share, rare tokens trade places, each
with the same other one everywhere in its row: a name then cannot be known from earlier epochs, only
from the row. Small models do not learn to copy from a few million tokens of natural text alone;
with such rows they form the heads that do (Olsson et al. 2022, "In-context learning and induction
heads").
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from kvalign.training.settings import PretrainSettings
from kvalign.training.token_mix import Rows, TokenMix

MIN_PASSAGE = 16  # tokens; the longest is half a row
RARE_FROM = 1024  # a byte-level BPE numbers its tokens by how often they are merged
ENDS_AT = 0.8  # of the steps: from there on all rows are natural


def decay(step: int, num_steps: int) -> float:
    """Share of its first value that what falls has at a step."""
    return max(0.0, 1 - step / (ENDS_AT * num_steps))


@dataclass(frozen=True)
class ContextRows:
    """Rows of a mix, changed in shares that fall linearly to 0 over the first `ENDS_AT` of
    the steps. The input of a step depends only on the seed and the step.

    The first rows are short, and a passage fills them again and again: what there is to copy is
    near, and little else is. They lie at random positions, so that all positions are trained.
    """

    mix: TokenMix
    settings: PretrainSettings
    vocab_size: int
    short_by: ClassVar[int] = 8

    def batch(self, seed: int, step: int, num_rows: int, row_len: int) -> Rows:
        """Rows of `row_len` tokens from random places, some of them changed."""
        natural = self.mix.batch(seed, step, num_rows, row_len)
        ids = torch.cat([natural.ids, natural.labels[:, -1:]], 1).numpy()  # [B, T + 1]
        settings = self.settings
        share = decay(step, settings.num_steps)
        rng = np.random.default_rng((seed, step, 1))
        first = int(rng.integers(settings.context_len - row_len, endpoint=True))
        for row in ids:
            if rng.random() < share * settings.repeat_share:
                (repeat if row_len == settings.context_len else fill)(row, rng)
            if rng.random() < share * settings.rename_share:
                row[:] = renaming(self.vocab_size, rng)[row]
        whole = torch.from_numpy(ids)
        return Rows(whole[:, :-1], whole[:, 1:], first)


def repeat(row: np.ndarray, rng: np.random.Generator) -> None:
    """Write a passage of a row [T + 1] over a later place of the same length, without overlap."""
    longest = len(row) // 2
    num_tokens = round(np.exp(rng.uniform(np.log(min(MIN_PASSAGE, longest)), np.log(longest))))
    first = rng.integers(len(row) - 2 * num_tokens, endpoint=True)
    second = rng.integers(first + num_tokens, len(row) - num_tokens, endpoint=True)
    row[second : second + num_tokens] = row[first : first + num_tokens].copy()


def fill(row: np.ndarray, rng: np.random.Generator) -> None:
    """Fill a row [T + 1] with its first few tokens, again and again."""
    longest = max(2, len(row) // 3)
    num_tokens = rng.integers(min(MIN_PASSAGE // 2, longest), longest, endpoint=True)
    row[:] = np.resize(row[:num_tokens], len(row))


def renaming(vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return which token each token becomes, [vocab_size]: a permutation of the rare ones."""
    becomes = np.arange(vocab_size)
    becomes[RARE_FROM:] = rng.permutation(becomes[RARE_FROM:])
    return becomes
