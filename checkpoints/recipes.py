"""Rows and losses of the reference models beyond the plain recipe.

`recall-gpt2` and `recall-llama` learned from facts and questions, of which only answers count:
`kvalign pretrain --corpus recall`.

`context-gpt2` had rows that reward a small model for copying what it has read far back, mixed into
natural ones at first, and a loss of the heads that copy: --repeat-share, --rename-share and
--copy-weight. In a share of the rows a passage occurs a second time. In a share, rare tokens trade
places, each with the same other one everywhere in its row: a name then cannot be known from earlier
epochs, only from the row. Small models do not learn to copy from a few million tokens of natural
text alone; with such rows they form the heads that do.

After `A B ... A` such a model should guess `B`. Two layers do that (Olsson et al. 2022, "In-context
learning and induction heads"): a head of the earlier one writes into each entry which token came
before it, a head of the later one looks for the entry before which the newest token came. The loss
of a language model alone forms them late, as neither helps without the other. So both are shown
where to look until they are there.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

from kvalign.data_gen.facts import FactStreams
from kvalign.training.pretraining_inputs import Rows, TokenMix
from kvalign.training.settings import PretrainSettings
from kvalign.training.text import row_ages

NO_LABEL = -100  # what torch's cross entropy leaves out
NUM_EVAL_ROWS = 2000
NUM_EIGHTHS = 8
MIN_PASSAGE = 16  # tokens; the longest is half a row
RARE_FROM = 1024  # a byte-level BPE numbers its tokens by how often they are merged
NUM_HEADS = 2  # of either kind
_LEAST = 1e-5  # of an attention weight: the logarithm of 0 is none
ENDS_AT = 0.8  # of the steps: from there on all rows are natural


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


@torch.no_grad()
def accuracy_by_age(model: PreTrainedModel, context_len: int) -> list[float]:
    """Share of right answers in rows of `context_len` tokens, each read whole, by the age of the
    fact: up to an eighth of the context length, up to two, ...
    """
    streams = FactStreams(1, NUM_EVAL_ROWS, context_len, ask_oldest=True)
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


def loss_and_copies(
    model: PreTrainedModel, ids: Tensor, labels: Tensor, position_ids: Tensor, weight: Tensor
) -> Tensor:
    """Mean NLL in nats of the labels of ids [B, T], and `copy_loss` by its weight []."""
    out = model(input_ids=ids, position_ids=position_ids, use_cache=False, output_attentions=True)
    nll = cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten())
    return nll + weight * copy_loss(out.attentions, ids, labels)


def copy_loss(attentions: tuple[Tensor, ...], ids: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats of looking at the right entries, from attention weights [B, H, T, T] of each
    layer: the first heads of one layer at the token before, those of a later layer at each entry
    that a copy of the newest token came before, and that is the label.
    """
    before, after = layers_of(len(attentions))
    back = attentions[before][:, :NUM_HEADS].float().diagonal(-1, -2, -1)  # [B, H, T - 1]
    loss = -(back + _LEAST).log().mean()
    right = right_places(ids, labels)[:, None]  # [B, 1, T, T]
    weights = (attentions[after][:, :NUM_HEADS].float() * right).sum(-1)  # [B, H, T]
    counted = right.any(-1).expand_as(weights)
    return loss - ((weights + _LEAST).log() * counted).sum() / counted.sum().clamp(min=1)


def layers_of(num_layers: int) -> tuple[int, int]:
    """Layers whose first heads look at the token before, and at what came after a copy."""
    before = num_layers // 3
    return before, max(before + 1, 2 * num_layers // 3)


def right_places(ids: Tensor, labels: Tensor) -> Tensor:
    """Return which entries copy the label of each token of ids [B, T]: [B, T, T] bool, tokens by
    entries.
    """
    before = pad(ids[:, :-1], (1, 0), value=-1)
    follows = before[:, None, :] == ids[:, :, None]
    is_label = ids[:, None, :] == labels[:, :, None]
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    return follows & is_label & seen
