"""Rows of a batch that come and go, each held against itself alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.tiny_models import VOCAB
from kvalign.methods.base import Method

LATE = 3  # the row that comes a second time


def come_and_go(
    method: Method,
    lens: Sequence[int],
    stay: Sequence[int],
    *,
    num_steps: int,
    leave: int,
    join: int,
    look: Callable[[Method], Any] = lambda method: None,
) -> tuple[Method, list[int], list[Any]]:
    """Prompts of `lens` tokens fed alone, joined and stepped, with the logits of each alone to
    1e-4; before step `leave` the rows `stay` are kept, in that order, before step `join` row 3
    comes late, from elsewhere.

    Returns:
        the batch, which rows it has, and what `look` saw of each stream at its end, alone.
    """
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB, (1, n), generator=rng) for n in lens]
    answers = torch.randint(1, VOCAB, (len(lens), num_steps), generator=rng)
    alone, seen = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        method.reset()
        logits = [method.feed(prompt)]
        logits += [method.feed(token.view(1, 1)) for token in answer]
        alone.append(torch.cat(logits))
        seen.append(look(method))
    method.reset()
    methods = [method.new() for _ in prompts]
    for one, prompt, expected in zip(methods, prompts, alone, strict=True):
        assert torch.allclose(one.feed(prompt)[0], expected[0], atol=1e-4)
    batch, rows = methods[0], list(range(len(lens)))
    batch.join(methods[1:])
    for i in range(num_steps):
        if i == leave:
            batch.select(stay)
            rows = list(stay)
        if i == join:
            late = batch.new()
            late.feed(prompts[LATE])
            for token in answers[LATE, :join]:
                late.feed(token.view(1, 1))
            batch.join([late])
            rows.append(LATE)
        logits = batch.feed(answers[rows, i : i + 1])
        expected = torch.stack([alone[row][i + 1] for row in rows])
        assert torch.allclose(logits, expected, atol=1e-4), i
    return batch, rows, seen
