"""Logits processors of transformers that read each token of an endless stream once."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import transformers
from torch import Tensor


class KnownTokens(transformers.LogitsProcessor):
    """No token is drawn for which the tokenizer has no text: `unknown`, which are below V."""

    def __init__(self, unknown: Sequence[int]):
        self.unknown = torch.tensor(unknown)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after ids [B, T]."""
        self.unknown = self.unknown.to(scores.device)
        return scores.index_fill(1, self.unknown, -torch.inf)


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


class RecentPenalty(transformers.LogitsProcessor):
    """The same penalty for the last `window` generated tokens alone. So it stays as strong in a
    long talk as in a short one, and words that were read may be said.

    Args:
        penalty: as that of `RepetitionPenalty`.
        window: tokens, at least 1.
        num_before: tokens before the text that is now written; None: all of the first call.
        earlier: texts that were generated before, as tokens, the newest first.
    """

    def __init__(
        self,
        penalty: float,
        window: int,
        num_before: int | None = None,
        earlier: Iterable[Sequence[int]] = (),
    ):
        self.penalty, self.window, self.num_before = penalty, window, num_before
        newest: list[int] = []
        for text in earlier:
            if len(newest) >= window:
                break
            newest = [*text, *newest]
        self.earlier = torch.tensor([newest], dtype=torch.int64)  # [1, T]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after ids [B, T], which go on those of the last call."""
        if self.num_before is None:
            self.num_before = input_ids.shape[1]
        ids = input_ids[:, max(self.num_before, input_ids.shape[1] - self.window) :]
        if num := min(self.window - ids.shape[1], self.earlier.shape[1]):
            self.earlier = self.earlier.to(ids.device)
            ids = torch.cat([self.earlier[:, -num:].expand(len(ids), -1), ids], 1)
        own = scores.gather(1, ids)
        return scores.scatter(1, ids, torch.where(own < 0, own * self.penalty, own / self.penalty))
