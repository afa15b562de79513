"""Subject of the invariants: a model and a function that makes a cache."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect
from kvalign.invariants.stream import SAME, NotApplicableError, Stream
from kvalign.methods.base import Method
from kvalign.models.architectures import Family, ModelSpec, spec_of
from kvalign.models.packed import PACKED, weights_of

EXACT = 1e-3
"""Allowed difference of two computations of the same logits in float32, in standard deviations."""
ROUNDED = 0.8
"""The same with packed weights, whose products round their inputs: what differs by the last digit
before may come out a step apart."""

OF_INT8 = 0.6
"""The same with entries in 8 bits, which the last digit may round another way, too."""

T = TypeVar("T")
Make = Callable[[PreTrainedModel], Cache | Method]

MOST_PROBED = 1024  # tokens after which a cache that has evicted nothing is taken to keep all
SAMPLED_LEN = 128  # tokens of a text that the model writes itself


class Subject:
    """Model and a function that makes a cache for it.

    Args:
        model: a causal LM of transformers; a float32 copy is used if it is in half precision.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make: Make,
        num_steps: int,
        half: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ):
        is_float32 = model.dtype == torch.float32
        self.model = model if is_float32 else in_precision(model, torch.float32)
        self.make, self.num_steps, self.half, self.seed = make, num_steps, half, seed

    @cached_property
    def spec(self) -> ModelSpec | None:
        """Specification of the model; None for an architecture that KV-Align does not stream."""
        try:
            return spec_of(self.model.config)
        except UserError:
            return None

    @property
    def family(self) -> Family | None:
        """Family of the model's positions; None if it is unknown."""
        return self.spec.family if self.spec else None

    @property
    def context_len(self) -> int | None:
        """Positions that the model was built for; None if nothing limits them."""
        if self.spec:
            return self.spec.context_len
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def exact(self) -> float:
        """Tolerance between two computations of the same logits, in standard deviations of them."""
        is_packed, has_memory = weights_of(self.model) in PACKED, self._sizes and self._sizes.memory
        rounded = ROUNDED * is_packed + OF_INT8 * self.is_int8
        # Rounded another way, an entry may score less than another, which is then taken back.
        return max(EXACT, rounded * (2 if has_memory else 1))

    @cached_property
    def _sizes(self) -> CacheSizes | None:
        """Sizes of its cache, if it is one of KV-Align."""
        cache = self.stream().cache
        return cache.sizes if isinstance(cache, StreamingCache) else None

    @property
    def is_int8(self) -> bool:
        return self._sizes is not None and self._sizes.cache_dtype == "int8"

    @property
    def same(self) -> float:
        """Share of the greatest number by which numbers of the same entry may be apart: of 8 bits
        half a step for each time that it was rounded.
        """
        return 2 / 127 if self.is_int8 else SAME

    @property
    def room(self) -> int:
        """Tokens that can be fed to a cache that keeps all."""
        return min(self.context_len or MOST_PROBED, MOST_PROBED)

    def stream(self, is_watched: bool = False, model: PreTrainedModel | None = None) -> Stream:
        model = model or self.model
        keeper = self.make(model)
        needed = "a Cache of transformers or a method of kvalign.make_method"
        expect("what `make` returns", keeper, Cache | Method, needed)
        return Stream(model, keeper.new() if isinstance(keeper, Method) else keeper, is_watched)

    @cached_property
    def capacity(self) -> int:
        """Most entries that a token can find."""
        stream, most, ids = self.stream(is_watched=True), 0, self.ids(1, self.room)
        for i in range(self.room):
            stream.feed(ids[:, i : i + 1])
            if stream.num_read < i:
                break
            most = stream.num_read
        return most

    @property
    def evicts(self) -> bool:
        return self.capacity < self.room - 1

    def needs_eviction(self) -> None:
        if not self.evicts:
            raise NotApplicableError(f"it evicts nothing in {self.capacity + 1} tokens")

    @property
    def num_unevicted(self) -> int:
        """Tokens that can be fed before the first eviction."""
        return self.capacity + 1 if self.evicts else self.capacity

    @property
    def num_tokens(self) -> int:
        """Tokens of a short stream: some past the first eviction, if there is one."""
        return self.capacity + 8 + min(self.capacity, 64) if self.evicts else self.capacity

    def ids(self, num_rows: int, num_tokens: int) -> Tensor:
        """Random ids [B, N]; a row has as many different ones as possible before one repeats."""
        rng, words = torch.Generator().manual_seed(self.seed), self._words
        times = -(-num_tokens // len(words))
        rows = [
            torch.cat([words[torch.randperm(len(words), generator=rng)] for _ in range(times)])
            for _ in range(num_rows)
        ]
        return torch.stack(rows)[:, :num_tokens].to(self.model.device)

    @property
    def _words(self) -> Tensor:
        words = torch.arange(self.model.config.vocab_size)
        return words[words != (self.model.config.pad_token_id or 0)]

    @torch.no_grad()
    def written_ids(self, num_rows: int, num_tokens: int) -> Tensor:
        """Ids [B, N] of texts that the model writes itself, so that they are likely ones."""
        length = min(SAMPLED_LEN, self.room)
        num_texts = -(-num_rows * num_tokens // length)
        rng = torch.Generator().manual_seed(self.seed)
        ids, cache = self.ids(num_texts, 1), None
        last, parts = ids, [ids]
        for _ in range(length - 1):
            out = self.model(input_ids=last, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = out.logits[:, -1, self._words].float().softmax(-1).cpu()
            index = torch.multinomial(probabilities, 1, generator=rng)
            last = self._words[index].to(ids.device)
            parts.append(last)
        return torch.cat(parts, 1).flatten()[: num_rows * num_tokens].view(num_rows, num_tokens)

    @torch.no_grad()
    def encoded(self, ids: Tensor, model: PreTrainedModel | None = None) -> Tensor:
        """Logits [B, T, V] of ids [B, T] from position 0, without a cache."""
        return (model or self.model)(input_ids=ids, use_cache=False).logits.float()


def once(run: Callable[[Subject], T]) -> Callable[[Subject], T]:
    """Decorator: the function runs once for each subject."""

    @wraps(run)
    def outcome(subject: Subject) -> T:
        if run.__name__ not in vars(subject):
            vars(subject)[run.__name__] = run(subject)
        return vars(subject)[run.__name__]

    return outcome


def in_precision(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy whose weights, except its rotary frequencies, are in another precision."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def first_layer(model: PreTrainedModel) -> nn.Module:
    num = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num:
            return module[0]
    raise NotApplicableError("its first layer was not found")


@dataclass(frozen=True)
class Measured:
    """Measured figure.

    Attributes:
        figure: holds if it is at most `bound`; the invariant says what it measures.
        note: further information.
    """

    figure: float
    bound: float = EXACT
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.bound  # nan does not


@dataclass(frozen=True)
class Invariant:
    """Property that every streaming cache must have.

    Attributes:
        about: the property in words.
        unit: of the figure.
        look_at: the most likely place of the fault if it fails.
        measure: raises NotApplicableError if there is nothing to measure.
    """

    about: str
    unit: str
    look_at: str
    measure: Callable[[Subject], Measured]


def invariant(
    about: str, *, unit: str = "sd of logits", look_at: str
) -> Callable[[Callable[[Subject], Measured]], Invariant]:
    """Decorator that makes an invariant of a function that measures."""
    return partial(Invariant, about, unit, look_at)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an invariant for one cache and model.

    Attributes:
        name: in `INVARIANTS`.
        figure, bound: the measured figure and its largest allowed value; None if nothing was
            measured.
        note: why it does not apply, the exception, or another figure.
        look_at: for a failure, the most likely place of the fault.
    """

    name: str
    about: str
    state: Literal["passed", "failed", "not applicable"]
    figure: float | None = None
    bound: float | None = None
    unit: str = ""
    note: str = ""
    look_at: str = ""


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors in standard deviations of the second; inf if not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    errors = (actual.float() - expected.float()).abs().max() / expected.float().std()
    return float(errors) if errors.isfinite() else float("inf")
