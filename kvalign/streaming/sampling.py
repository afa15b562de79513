"""Sampling: how the next token of a stream is chosen."""

from __future__ import annotations

import secrets
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import check_keywords
from kvalign.foundation.settings import flag, typed, without_none
from kvalign.methods import MethodConfig

if TYPE_CHECKING:
    import torch
    import transformers

# What says from which tokens one is drawn, and what a model's generation_config may say.
DRAWS = ("temperature", "top_k", "top_p", "min_p")
OF_MODEL = ("do_sample", *DRAWS, "repetition_penalty")
PENALTIES = ("repetition_penalty", "repetition_window", "no_repeat_ngram_size")
# Beyond these logits overflow.
COLDEST, HOTTEST, MOST_PENALTY = 1e-6, 1e6, 1e3
MOST_GUESSED = 64  # tokens of a pass: their logits are held
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("at least 1", lambda x: x >= 1),
    "temperature": (
        f"0, or at least {COLDEST:g} and at most {HOTTEST:g}",
        lambda x: x == 0 or COLDEST <= x <= HOTTEST,
    ),
    "top_k": ("at least 0 (0 draws from all)", lambda x: x >= 0),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": (
        f"at least {1 / MOST_PENALTY:g} and at most {MOST_PENALTY:g}",
        lambda x: 1 / MOST_PENALTY <= x <= MOST_PENALTY,
    ),
    "no_repeat_ngram_size": ("at least 0", lambda x: x >= 0),
    "repetition_window": ("at least 0 (0: all tokens)", lambda x: x >= 0),
    "stop_strings": (
        "texts that are not empty",
        lambda x: all(isinstance(text, str) and text for text in x),
    ),
    "seed": ("at least 0 and below 2^63", lambda x: 0 <= x < 2**63),
    "lookup": (f"at least 0 and at most {MOST_GUESSED}", lambda x: 0 <= x <= MOST_GUESSED),
}


class SamplingConfig(TypedDict, total=False):
    """Keywords of `Sampling`; its fields explain each."""

    max_new_tokens: int | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    no_repeat_ngram_size: int
    stop_at_end: bool
    stop_strings: str | Sequence[str] | None
    seed: int | None
    lookup: int


class StreamConfig(MethodConfig, SamplingConfig, total=False):
    """All settings of streamed text: `MethodConfig`, `SamplingConfig`, and `compile` as in
    `kvalign.make_method`.
    """

    compile: bool | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token: penalties, then temperature, top_k, top_p and min_p, in the order
    and with the names of transformers.

    Attributes:
        max_new_tokens: tokens after each input; None: without end.
        do_sample: draw; False takes the most likely token, as temperature 0 and top_k 1 do.
        temperature: divides the logits.
        top_k: draw from the k most likely; 0: from all.
        top_p: draw from the fewest tokens whose probabilities add up to this; 1: from all.
        min_p: draw from tokens with at least this share of the highest probability; 0: all.
        repetition_penalty: above 1, all earlier tokens become less likely, prompt and evicted ones
            included; 1: off.
        repetition_window: number of tokens that were generated last, to which that penalty is
            limited: what was read may be said again; 0: all tokens.
        no_repeat_ngram_size: over the whole history; 0: off.
        stop_at_end: end at a token that ends a text or an answer of the model.
        stop_strings: one or several texts; the first that is generated ends the text.
        seed: of the draws; None: a random one, which can be read here.
        lookup: most tokens that are guessed at a time, from earlier occurrences of the same words,
            and checked in one pass. The text is the same, but repetitions come sooner. 0: none.

    Raises:
        UserError: a value of another type or out of range.
    """

    max_new_tokens: int | None = None
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    no_repeat_ngram_size: int = 0
    stop_at_end: bool = False
    stop_strings: str | Sequence[str] | None = ()
    seed: int | None = None
    lookup: int = 0

    def __post_init__(self) -> None:
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbelow(2**31))
        strings = () if self.stop_strings is None else self.stop_strings
        if not isinstance(strings, str | Sequence):
            raise UserError(f"stop_strings must be a text or several, got {strings!r:.80}")
        strings = (strings,) * bool(strings) if isinstance(strings, str) else tuple(strings)
        object.__setattr__(self, "stop_strings", strings)
        for name, hint in typing.get_type_hints(Sampling).items():
            value, kind = getattr(self, name), without_none(hint)
            if value is None and kind is not hint:
                continue
            value = typed(name, value, kind)
            needed, holds = _RANGES.get(name, ("", lambda x: True))
            if not holds(value):
                raise UserError(f"{name} must be {needed}, got {value}")
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, function: Callable, keywords: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
        """Return the sampling in a function's keywords, and its other keywords; KeywordError for
        one that the function does not have.
        """
        check_keywords(function, keywords)
        own = {field.name for field in fields(cls)} & keywords.keys()
        sampling = {name: keywords[name] for name in own}
        return cls(**sampling), {name: x for name, x in keywords.items() if name not in own}

    @staticmethod
    def of_model(config: transformers.GenerationConfig) -> dict[str, Any]:
        """Return the sampling of a model's generation_config, by field."""
        values = config.to_diff_dict()
        return {name: values[name] for name in OF_MODEL if values.get(name) is not None}

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0 or self.top_k == 1

    def processors(
        self,
        num_before: int | None = None,
        earlier: Iterable[Sequence[int]] = (),
    ) -> transformers.LogitsProcessorList:
        """Processors of transformers, in its order, for one stream from its beginning.

        Args:
            num_before: tokens before the text that is now written; None: all of the first call.
            earlier: texts that the stream generated before, as tokens, the newest first.
        """
        import transformers

        from kvalign.streaming.processors import (
            NoRepeatedNGrams,
            RecentPenalty,
            RepetitionPenalty,
        )

        processors = transformers.LogitsProcessorList()
        penalty, window = self.repetition_penalty, self.repetition_window
        if self.has_penalty and window:
            processors.append(RecentPenalty(penalty, window, num_before, earlier))
        elif self.has_penalty:
            processors.append(RepetitionPenalty(penalty))
        if self.no_repeat_ngram_size:
            processors.append(NoRepeatedNGrams(self.no_repeat_ngram_size))
        if self.is_greedy:
            return processors
        if self.temperature != 1.0:
            processors.append(transformers.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            processors.append(transformers.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            processors.append(transformers.TopPLogitsWarper(float(self.top_p)))
        if self.min_p:
            processors.append(transformers.MinPLogitsWarper(float(self.min_p)))
        return processors

    def generator(self, device: torch.device, row: int = 0) -> torch.Generator:
        """Source of random numbers: for row i of a batch, that of seed + i."""
        import torch

        assert self.seed is not None
        return torch.Generator(device).manual_seed(self.seed + row)

    def of_row(self, device: torch.device, row: int = 0) -> dict[str, Any]:
        """Arguments of `Row` for row i of a batch."""
        return {
            "processors": self.processors(),
            "do_sample": not self.is_greedy,
            "generator": self.generator(device, row),
        }

    def in_flags(self) -> str:
        """Flags of the command line for the same choice, in short: `--top-k 20 --seed 7`."""
        if not self.do_sample:
            words = ["--no-do-sample"]
        elif self.is_greedy:
            words = ["--temperature 0"] if self.temperature == 0 else ["--top-k 1"]
        else:
            names = [name for name in DRAWS if name == "top_k" or self._differs(name)]
            words = [f"{flag(name)} {getattr(self, name):g}" for name in names]
            words.append(f"--seed {self.seed}")
        names = [name for name in PENALTIES if name != "repetition_window" or self.has_penalty]
        penalties = filter(self._differs, names)
        return " ".join([*words, *(f"{flag(name)} {getattr(self, name):g}" for name in penalties)])

    def _differs(self, name: str) -> bool:
        return getattr(self, name) != getattr(Sampling, name)
