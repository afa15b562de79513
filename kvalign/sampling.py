"""How the next token of a stream is chosen."""

from collections import defaultdict
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from kvalign.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: tokens after each input; None: without end.
        top_k: draw from the k most likely; 1 is greedy.
        temperature: divides the logits.
        no_repeat_ngram_size: over the whole history, 0 for off.
        stop_at_end: end at the model's end token.
        seed: of the draws.
    """

    max_new_tokens: int | None = None
    top_k: int = 20
    temperature: float = 1.0
    no_repeat_ngram_size: int = 0
    stop_at_end: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        low = {"max_new_tokens": 1, "top_k": 1, "no_repeat_ngram_size": 0}
        for name, least in low.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}, got {value}")
        if not self.temperature > 0:
            raise UserError(f"temperature must be above 0, got {self.temperature}")

    def processors(self) -> transformers.LogitsProcessorList:
        """Those of transformers, in its order, for one stream from its beginning."""
        processors = transformers.LogitsProcessorList()
        if self.no_repeat_ngram_size:
            processors.append(NoRepeatedNGrams(self.no_repeat_ngram_size))
        if self.temperature != 1.0:
            processors.append(transformers.TemperatureLogitsWarper(self.temperature))
        if self.top_k > 1:
            processors.append(transformers.TopKLogitsWarper(self.top_k))
        return processors


class NoRepeatedNGrams(transformers.LogitsProcessor):
    """What `NoRepeatNGramLogitsProcessor` of transformers gives, for one endless stream: it reads
    each token once, where that one reads the whole history for every new token.
    """

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
