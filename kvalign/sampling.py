"""How the next token of a stream is chosen."""

from dataclasses import dataclass

from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

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

    def processors(self) -> LogitsProcessorList:
        """transformers' own, in its order."""
        processors = LogitsProcessorList()
        if self.no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 1:
            processors.append(TopKLogitsWarper(self.top_k))
        return processors
