"""Logits processors of transformers for one endless stream: they read each token once, where those
of transformers read the whole history for every new token.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

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


class Dry(transformers.LogitsProcessor):
    """DRY, "don't repeat yourself" ([p-e-w
    2024](https://github.com/oobabooga/text-generation-webui/pull/5677)): if the last n tokens were
    generated before, n >= `ALLOWED`, the token that followed them there loses multiplier *
    `BASE` ** (n - `ALLOWED`) of its score. So a short phrase may come again, a sentence does not.

    Only the last `WINDOW` generated tokens count, so what was read may be quoted. The n tokens are
    of the text that is now written; its beginning counts as one, if an earlier one began like it.

    Args:
        multiplier: above 0.
        num_before: tokens before the text that is now written; None: all of the first call.
        earlier: texts that were generated before, as tokens, the newest first.
    """

    ALLOWED, BASE, WINDOW, LONGEST = 3, 1.75, 1024, 24

    def __init__(
        self,
        multiplier: float,
        num_before: int | None = None,
        earlier: Iterable[Sequence[int]] = (),
    ):
        self.multiplier, self.num_read = multiplier, num_before
        self._earlier: list[int] = []
        for text in earlier:
            self._earlier = [_BEGIN, *text, *self._earlier]
            if len(self._earlier) > self.WINDOW:
                break
        self._rows: list[_Generated] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] after ids [B, T], which go on those of the last call."""
        if not self._rows:
            self._rows = [_Generated(self._earlier) for _ in input_ids]
        if self.num_read is None:
            self.num_read = input_ids.shape[1]
        new, self.num_read = input_ids[:, self.num_read :].tolist(), input_ids.shape[1]
        scores = scores.clone()
        for i, (row, ids) in enumerate(zip(self._rows, new, strict=True)):
            row.append(ids)
            for token, num in row.followers(self.ALLOWED, self.LONGEST, self.WINDOW).items():
                scores[i, token] -= self.multiplier * self.BASE ** (num - self.ALLOWED)
        return scores


_BEGIN = -1  # of a text: two that begin alike have this in common, too


class _Generated:
    """Generated tokens of a row, and the places of each."""

    def __init__(self, earlier: Sequence[int]):
        self._begin, self._ids = 0, list[int]()
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self.append([*earlier, _BEGIN])
        self._begin = len(self._ids) - 1

    def append(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._places[token].append(len(self._ids))
            self._ids.append(token)
        if (num_old := len(self._ids) - 2 * Dry.WINDOW) > 6 * Dry.WINDOW:  # a stream has no end
            ids, self._ids = self._ids[num_old:], []
            self._begin = max(0, self._begin - num_old)
            self._places.clear()
            self.append(ids)

    def followers(self, allowed: int, most: int, window: int) -> dict[int, int]:
        """Tokens that followed an earlier occurrence of the last n tokens, at least `allowed` and
        at most `most`, by token the greatest n. It begins in the last `window` tokens.
        """
        ids, found = self._ids, dict[int, int]()
        most = min(most, len(ids) - self._begin)
        if most < allowed:
            return found
        for place in self._places[ids[-1]][-2::-1]:
            if len(ids) - place > window:
                break
            num = 1
            while num < most and place >= num and ids[place - num] == ids[-1 - num]:
                num += 1
            if num >= allowed and (token := ids[place + 1]) != _BEGIN:
                found[token] = max(num, found.get(token, 0))
        return found
