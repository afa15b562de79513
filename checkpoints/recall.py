"""What `recall-gpt2` and `recall-llama` were trained on, facts and questions, and how often they
are right: `kvalign pretrain --corpus recall`.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from kvalign.data_gen.facts import FactStreams
from kvalign.training.pretraining_inputs import Rows
from kvalign.training.text import row_ages

NO_LABEL = -100  # what torch's cross entropy leaves out
NUM_EVAL_ROWS = 2000
NUM_EIGHTHS = 8


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
