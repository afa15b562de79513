"""Sampling: how the next token of a stream is chosen."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import check_keywords
from kvalign.foundation.settings import MOST_SEED, check_fields, flag, option
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
MAX_NEW_TOKENS = 200  # of a text that does not end by itself
MOST_GUESSED = 64  # tokens of a pass: their logits are held


def drawing(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, where one of how to draw implies that tokens are drawn."""
    return {"do_sample": True, **options} if options.keys() & set(DRAWS) else {**options}


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
    """All settings of streamed text; `compile` as in `kvalign.make_method`, by default None."""

    compile: bool | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token: penalties, then temperature, top_k, top_p and min_p, in the order
    and with the names of transformers.

    Raises:
        UserError: a value of another type or out of range.
    """

    max_new_tokens: int | None = option(None, help="most new tokens after an input", at_least=1)
    do_sample: bool = option(True, help="draw each token, the default, or take the likeliest")
    temperature: float = option(
        1.0,
        help="divides the logits before a draw; 0: the likeliest token",
        at_least=0,
        at_most=HOTTEST,
    )
    top_k: int = option(20, help="draw from the k most likely tokens; 0: all", at_least=0)
    top_p: float = option(
        1.0, help="draw from the fewest tokens that add up to this; 1: all", above=0, at_most=1
    )
    min_p: float = option(
        0.0, help="drop tokens below this share of the best one; 0: none", at_least=0, at_most=1
    )
    repetition_penalty: float = option(
        1.0,
        help="above 1, tokens that occurred before, also evicted ones, are less likely",
        at_least=1 / MOST_PENALTY,
        at_most=MOST_PENALTY,
    )
    repetition_window: int = option(
        0, help="newest generated tokens, to which that penalty is limited; 0: all", at_least=0
    )
    no_repeat_ngram_size: int = option(0, help="repeat no n-gram of this size; 0: off", at_least=0)
    stop_at_end: bool = option(False, help="stop at a token that ends a text or an answer")
    stop_strings: str | Sequence[str] | None = option((), help="stop when this text is generated")
    seed: int | None = option(
        None, help="seed of the draws (default: random, and printed)", at_least=0, at_most=MOST_SEED
    )
    lookup: int = option(
        0,
        help="most tokens to guess at once from earlier text: faster if it repeats itself; 0: none",
        at_least=0,
        at_most=MOST_GUESSED,
    )

    def __post_init__(self) -> None:
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbelow(2**31))
        strings = () if self.stop_strings is None else self.stop_strings
        strings = (strings,) * bool(strings) if isinstance(strings, str) else strings
        if not isinstance(strings, Sequence) or not all(x and isinstance(x, str) for x in strings):
            raise UserError(f"stop_strings must be texts that are not empty, got {strings!r:.80}")
        object.__setattr__(self, "stop_strings", tuple(strings))
        check_fields(self)
        if 0 < self.temperature < COLDEST:
            raise UserError(f"temperature must be 0, or at least {COLDEST:g}")

    @classmethod
    def of(cls, function: Callable, keywords: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
        """The sampling in a function's keywords, and the others; KeywordError if unknown."""
        check_keywords(function, keywords)
        names = {field.name for field in fields(cls)} & keywords.keys()
        sampling = {name: keywords[name] for name in names}
        return cls(**sampling), {name: x for name, x in keywords.items() if name not in names}

    @staticmethod
    def of_model(config: transformers.GenerationConfig) -> dict[str, Any]:
        """Return the sampling of a model's generation_config, by field."""
        values = config.to_diff_dict()
        return {name: values[name] for name in OF_MODEL if values.get(name) is not None}

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0 or self.top_k == 1

    def processors(
        self,
        num_before: int | None = None,
        earlier: Iterable[Sequence[int]] = (),
        unknown: Sequence[int] = (),
    ) -> transformers.LogitsProcessorList:
        """Processors of transformers, in its order, for one stream from its beginning.

        Args:
            num_before, earlier: as of `RecentPenalty`.
            unknown: tokens that are never drawn (`kvalign.models.input_ids.unknown_ids`).
        """
        import transformers

        from kvalign.streaming import processors as ours

        processors = transformers.LogitsProcessorList()
        if unknown:
            processors.append(ours.KnownTokens(unknown))
        penalty, window = self.repetition_penalty, self.repetition_window
        if self._differs("repetition_penalty") and window:
            processors.append(ours.RecentPenalty(penalty, window, num_before, earlier))
        elif self._differs("repetition_penalty"):
            processors.append(ours.RepetitionPenalty(penalty))
        if self.no_repeat_ngram_size:
            processors.append(ours.NoRepeatedNGrams(self.no_repeat_ngram_size))
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

    def of_row(
        self, device: torch.device, row: int = 0, unknown: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Arguments of `Row` for row i of a batch; `unknown` as of `processors`."""
        looks_back = self._differs("repetition_penalty") or self.no_repeat_ngram_size
        draws = (self.is_greedy, *(getattr(self, name) for name in DRAWS))
        return {
            "processors": self.processors(unknown=unknown),
            "do_sample": not self.is_greedy,
            "generator": self.generator(device, row),
            "draws": None if looks_back else draws,
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
        is_raised = self._differs("repetition_penalty")
        names = [name for name in PENALTIES if name != "repetition_window" or is_raised]
        penalties = filter(self._differs, names)
        return " ".join([*words, *(f"{flag(name)} {getattr(self, name):g}" for name in penalties)])

    def _differs(self, name: str) -> bool:
        return getattr(self, name) != getattr(Sampling, name)
