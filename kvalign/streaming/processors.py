"""Logits processors of transformers for one endless stream: they read each token once, where those
of transformers read the whole history for every new token.
"""

from collections import defaultdict

import torch
import transformers
from torch import Tensor


class NoRepeatedNGrams(transformers.LogitsProcessor):
    """Same result as `NoRepeatNGramLogitsProcessor` of transformers."""

    def __init__(self, size: int):
        self.size, self.num_read = size, 0
        self.followers: list[defaultdict[tuple[int, ...], set[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after ids [B, T], which go on those of the last call."""
        if not self.followers:
            self.followers = [defaultdict(set) for _ in input_ids]
        before = self.size - 1
        first = max(self.num_read - before, 0)
        scores = scores.clone()
        for i, followers in enumerate(self.followers):
            ids = input_ids[i, first:].tolist()
            for end in range(max(self.num_read - first, before), len(ids)):
                followers[tuple(ids[end - before : end])].add(ids[end])
            banned = followers.get(tuple(ids[len(ids) - before :])) if len(ids) >= before else None
            if banned:
                scores[i, torch.tensor(list(banned), device=scores.device)] = -torch.inf
        self.num_read = input_ids.shape[1]
        return scores


class RepetitionPenalty(transformers.LogitsProcessor):
    """Same result as `RepetitionPenaltyLogitsProcessor` of transformers: the score of every earlier
    token, prompt and evicted tokens included, is divided by the penalty if it is positive, else
    multiplied by it ([Keskar et al. 2019](https://arxiv.org/abs/1909.05858)).
    """

    def __init__(self, penalty: float):
        self.penalty, self.num_read = penalty, 0
        self.was_there: Tensor | None = None  # [B, V] bool

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after ids [B, T], which go on those of the last call."""
        if self.was_there is None:
            self.was_there = torch.zeros_like(scores, dtype=torch.bool)
        self.was_there.scatter_(1, input_ids[:, self.num_read :], True)
        self.num_read = input_ids.shape[1]
        lowered = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(self.was_there, lowered, scores)
