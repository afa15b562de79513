"""What every streaming method does: take in tokens, give the logits of the next one."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.cache import StreamingCache, expect_tensor
from kvalign.errors import UserError
from kvalign.models import spec_of
from kvalign.realign import Realigner
from kvalign.sizes import CacheSizes


class Method(ABC):
    """One way to stream; an instance is a batch of streams of equal length.

    Args:
        model: a causal LM of transformers.
        sizes: from `sizes_for`.

    Raises:
        UserError: more entries than the model has positions for.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    default_num_sinks: ClassVar[int] = 4
    takes_aligner: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    """Sizes that the method itself sets: `num_sinks`, `num_evicted`."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        self.model, self.spec, self.sizes = model, spec_of(model.config), sizes
        sizes.check_fits(self.spec)

    @classmethod
    def sizes_for(
        cls,
        cache_size: int,
        num_sinks: int | None = None,
        num_evicted: int | None = None,
        aligner: Aligner | None = None,
    ) -> CacheSizes:
        """The sizes of a cache; None takes the method's own default, or its aligner's."""
        if num_sinks is None:
            num_sinks = aligner.config.num_sinks if aligner else cls.default_num_sinks
        if num_evicted is None:
            num_evicted = cls.default_num_evicted(cache_size, num_sinks)
        return CacheSizes(cache_size, num_sinks, num_evicted)

    @classmethod
    def default_num_evicted(cls, cache_size: int, num_sinks: int) -> int:
        return 1

    @property
    def aligner_name(self) -> str | None:
        """What the aligner is called in a table of results; None for a method without one."""
        return None

    @property
    def title(self) -> str:
        """What a table calls it: `kvalign (table)`."""
        return f"{self.name} ({self.aligner_name})" if self.aligner_name else self.name

    @property
    def tokens_left(self) -> int | None:
        """Tokens that can still be fed; None: endless."""
        return None

    @property
    def fill(self) -> int:
        """Entries that the next token finds: at most cache_size, of `dense` all."""
        raise NotImplementedError(f"{self.name} does not say how full it is")

    @abstractmethod
    def reset(self) -> None:
        """Forget the stream."""

    @abstractmethod
    def feed(self, ids: Tensor) -> Tensor:
        """Take in ids [B, T] int64, T >= 1; return the next token's logits [B, V] float32."""

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """One pass of the model over ids [B, T], after what is cached: logits as of `feed`."""
        use = cache is not None
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=use, logits_to_keep=1)
        return out.logits[:, -1].float()

    def state(self) -> dict[str, Tensor]:
        """The stream so far; `restore` of a method made alike goes on with it, to the bit."""
        raise UserError(f"streams of {self.name} cannot be saved")

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on with the stream of `state`, tensors on the model's device.

        Raises:
            UserError: it is not the state of such a method on such a model.
        """
        raise UserError(f"streams of {self.name} cannot be saved")


class Cached(Method):
    """A method that keeps its entries in a streaming cache and moves them with a realigner."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.cache = StreamingCache(self.spec, sizes, self.realigner())

    @abstractmethod
    def realigner(self) -> Realigner | None:
        """What moves kept entries."""

    @property
    def fill(self) -> int:
        return self.cache.get_seq_length()

    def reset(self) -> None:
        self.cache.reset()

    def state(self) -> dict[str, Tensor]:
        return self.cache.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self.cache.restore(state, self.model)

    def feed(self, ids: Tensor) -> Tensor:
        """The first cache_size + 1 tokens go in at once, more of them by half the window."""
        while True:
            num_now = self._chunk_len()
            logits = self.forward(ids[:, :num_now], self.cache)
            ids = ids[:, num_now:]
            if ids.shape[1] == 0:
                return logits

    def _chunk_len(self) -> int:
        stored = self.cache.get_seq_length()
        if stored < self.sizes.cache_size:
            return self.sizes.first_input_len - stored
        half = max(1, self.sizes.window_size // 2)
        return half if self.num_positions is None else min(half, self.num_positions - stored)

    @property
    def num_positions(self) -> int | None:
        """Positions at which an entry may be born; None: any."""
        return self.spec.context_len


class Reencoding(Method):
    """A method that re-encodes what it keeps: the logits of every step have nothing stale."""

    seen: Tensor | None
    """[B, S] int64, what the last step saw."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    def reset(self) -> None:
        self.seen = None

    def state(self) -> dict[str, Tensor]:
        return {} if self.seen is None else {"seen": self.seen}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        if not state:
            return
        shape = tuple(state["seen"].shape) if "seen" in state else ()
        seen = expect_tensor(state, "seen", shape, torch.int64)
        longest, vocab_size = self.sizes.first_input_len, self.model.config.vocab_size
        if not (
            seen.ndim == 2
            and seen.numel()
            and seen.shape[1] <= longest
            and 0 <= seen.min() <= seen.max() < vocab_size
        ):
            raise UserError(
                f"a stream's seen must be [B, S] ids below {vocab_size}, S at most {longest}"
            )
        self.seen = seen.to(self.model.device)

    def keep(self, ids: Tensor) -> Tensor:
        """The part of ids [B, T] that a step sees: all, or the sinks and what is left."""
        dropped, num_sinks = self.sizes.num_dropped(ids.shape[1] - 1), self.sizes.num_sinks
        if not dropped:
            return ids
        return torch.cat([ids[:, :num_sinks], ids[:, num_sinks + dropped :]], 1)

    @property
    def fill(self) -> int:
        length = 0 if self.seen is None else self.seen.shape[1]
        return length - self.sizes.num_dropped(length)
