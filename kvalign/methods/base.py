"""What every streaming method does: take in tokens, give the logits of the next one."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign import relative
from kvalign.aligners import Aligner
from kvalign.attention import install
from kvalign.cache import StreamingCache, expect_tensor
from kvalign.errors import UserError
from kvalign.models import spec_of
from kvalign.policies import OLDEST
from kvalign.policy_cache import PolicyCache
from kvalign.realign import Realigner
from kvalign.settings import typed
from kvalign.sizes import CacheSizes, Positions, num_evicted_of


class Method(ABC):
    """One way to stream; an instance is a batch of streams, its rows.

    Rows that begin together are fed together; streams of other lengths are fed alone and `join`.

    Args:
        model: a causal LM of transformers.
        sizes: from `sizes_for`.

    Attributes:
        on_tokens: told of a long input how many more of its tokens have been taken in.

    Raises:
        UserError: more entries than the model has positions for.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    default_num_sinks: ClassVar[int] = 4
    default_num_evicted: ClassVar[int | str] = 1
    takes_aligner: ClassVar[bool] = False
    takes_policy: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    """Sizes that the method itself sets: `num_sinks`, `num_evicted`."""
    aligner_name: str | None = None
    """What the aligner is called in a table of results; None for a method without one."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        # A model that comes compiled has its steps compiled; inputs of several tokens vary.
        self.compiled: Any = model if hasattr(model, "_orig_mod") else None
        self.model: PreTrainedModel = getattr(model, "_orig_mod", model)
        self.spec, self.sizes = spec_of(model.config), sizes
        self.on_tokens: Callable[[int], object] = lambda num: None
        sizes.check_fits(self.spec)

    @classmethod
    def sizes_for(
        cls,
        cache_size: int,
        num_sinks: int | None = None,
        num_evicted: int | str | None = None,
        aligner: Aligner | None = None,
        realign_every: int | None = None,
        policy: str | None = None,
        num_recent: int | None = None,
        positions: str | None = None,
    ) -> CacheSizes:
        """The sizes of a cache; None takes the method's own default, or its aligner's."""
        if num_sinks is None:
            num_sinks = aligner.config.num_sinks if aligner else cls.default_num_sinks
        if num_evicted is None:
            num_evicted = cls.default_num_evicted
        window_size = cache_size - typed("num_sinks", num_sinks, int)
        num_evicted = num_evicted_of(num_evicted, window_size)
        every = 1 if realign_every is None else realign_every
        return CacheSizes(
            cache_size,
            num_sinks,
            num_evicted,
            every,
            OLDEST if policy is None else policy,
            num_recent,
            "compact" if positions is None else cast(Positions, positions),
        )

    @classmethod
    def not_taken(cls) -> tuple[str, ...]:
        """Arguments of `sizes_for` that have no effect on it."""
        of_aligner = () if cls.takes_aligner else ("realign_every",)
        of_policy = () if cls.takes_policy else ("policy", "num_recent", "positions")
        return (*cls.fixed, *of_aligner, *of_policy)

    @property
    def title(self) -> str:
        """What a table calls it: `kvalign (table)`."""
        return f"{self.name} ({self.aligner_name})" if self.aligner_name else self.name

    @property
    def in_words(self) -> str:
        """What a command says it is: `kvalign (table), cache of 64 entries, 0 sinks`."""
        sizes = self.sizes
        kept = ", positions kept" if sizes.positions == "keep" else ""
        policy = "" if sizes.is_oldest else f", policy {sizes.policy}{kept}"
        return f"{self.title}, cache of {sizes.cache_size} entries, {sizes.num_sinks} sinks{policy}"

    @property
    def goes_stale(self) -> bool:
        """Whether entries that stay after an eviction are wrong where they are then."""
        return False

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

    def new(self) -> Self:
        """A method made alike, which has been fed nothing."""
        method = copy.copy(self)
        method.reset()
        return method

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        raise UserError(f"rows of {self.name} cannot be taken apart")

    def join(self, others: Sequence[Self]) -> None:
        """Add the rows of others made alike, of any lengths, after those that are here."""
        raise UserError(f"rows of {self.name} cannot be put together")

    @abstractmethod
    def feed(self, ids: Tensor) -> Tensor:
        """Take in ids [B, T] int64, T >= 1; return the next token's logits [B, V] float32."""

    def compile(self, **options: Any) -> Self:
        """Compile the model for the steps of a full cache, whose shapes never change; the first
        two of them take long. Inputs of several tokens go through the model as it is.

        Args:
            options: of `torch.compile`.
        """
        install(self.model.config)
        self.compiled = torch.compile(self.model, **options)
        return self

    @torch.no_grad()
    def step(self, ids: Tensor, cache: StreamingCache) -> Tensor:
        """One pass over ids [B, T] after what a streaming cache holds: logits as of `feed`."""
        if self.compiled is None or ids.shape[1] > 1:
            return self.forward(ids, cache, **cache.row_inputs(self.model))
        cache.ends_steps = False
        try:
            step = cache.begin_step(len(ids), 1)
            is_full = step.num_visible > self.sizes.cache_size - self.sizes.num_evicted
            if step.is_plain and is_full:
                model, inputs = self.compiled, {"position_ids": step.position_ids}
            else:
                model, inputs = self.model, cache.row_inputs(self.model)
            out = model(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs
            )
            cache.end_step()
        finally:
            cache.step, cache.ends_steps = None, True
        return out.logits[:, -1].float()

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: Cache | None = None, **inputs: Tensor) -> Tensor:
        """One pass of the model over ids [B, T], after what is cached: logits as of `feed`."""
        use = cache is not None
        out = self.model(
            input_ids=ids, past_key_values=cache, use_cache=use, logits_to_keep=1, **inputs
        )
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
    """A method that keeps its entries in a streaming cache, right for where they are.

    Attributes:
        cache: what it has of the stream.
        places_by: what keeps entries right in each of its caches, as `realigner` made it.
        is_exact: whether segments give what stepping gives.
    """

    takes_policy = True

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.places_by = self.realigner()
        self.cache = self._new_cache()
        self.is_exact = sizes.is_oldest and relative.is_exact(
            self.model, sizes.cache_size, self.cache.realigner
        )
        if self.is_exact:
            install(self.model.config)

    def _new_cache(self) -> StreamingCache:
        if self.sizes.is_oldest:
            return StreamingCache(self.spec, self.sizes, self.places_by)
        return PolicyCache(self.spec, self.sizes, self.places_by, self.model.config)

    @abstractmethod
    def realigner(self) -> Realigner | None:
        """What keeps entries right for their positions."""

    @property
    def goes_stale(self) -> bool:
        is_moved = self.sizes.positions == "compact"
        return self.spec.family == "learned" and self.cache.realigner is None and is_moved

    @property
    def tokens_left(self) -> int | None:
        last = getattr(self.cache, "last_token", None)
        return None if last is None else last - max(self.cache.seen, default=0)

    def compile(self, **options: Any) -> Self:
        if not self.sizes.is_oldest:
            raise UserError(
                f"policy {self.sizes.policy} with {self.sizes.positions} positions is not "
                "compiled: entries are gathered at each step"
            )
        return super().compile(**options)

    @property
    def fill(self) -> int:
        return self.cache.num_stored

    def reset(self) -> None:
        self.cache = self._new_cache()

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)

    def join(self, others: Sequence[Self]) -> None:
        self.cache.join([method.cache for method in others])

    def state(self) -> dict[str, Tensor]:
        return self.cache.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self.cache.restore(state, self.model)

    def feed(self, ids: Tensor) -> Tensor:
        """Where the relative form is exact an input counts as its tokens one by one, and goes in by
        segments; else the first cache_size + 1 tokens go in at once, more of them by half the
        window, all of which see what those before them saw.
        """
        if isinstance(self.cache, PolicyCache):
            self.cache.check_room(ids.shape[1])
        if ids.shape[1] > 1 and len(set(self.cache.seen)) > 1:
            for i in range(ids.shape[1]):
                logits = self.feed(ids[:, i : i + 1])
            return logits
        while True:
            num_now = self._chunk_len(ids.shape[1])
            now, ids = ids[:, :num_now], ids[:, num_now:]
            logits = self._take(now)
            self.on_tokens(now.shape[1])
            if ids.shape[1] == 0:
                return logits

    def _take(self, ids: Tensor) -> Tensor:
        if self._is_plain(ids.shape[1]):
            return self.step(ids, self.cache)
        return self.feed_segment(ids, logits_to_keep=1)[:, -1].float()

    @torch.no_grad()
    def feed_segment(self, ids: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Take in ids [B, T], each token as if it was fed alone; only where the relative form is
        exact.

        Returns:
            logits [B, T, V] after each of them, or after the last few.
        """
        return relative.feed(self.model, self.cache, ids, logits_to_keep)

    def _is_plain(self, num_tokens: int) -> bool:
        """Whether the model's own attention does: nothing is dropped between these tokens."""
        seen = max(self.cache.seen, default=0)
        return (
            num_tokens == 1
            or not self.is_exact
            or (seen == 0 and num_tokens <= self.sizes.first_input_len)
        )

    def _chunk_len(self, num_left: int) -> int:
        stored = self.cache.num_stored
        if self.is_exact and not self._is_plain(num_left):
            return relative.SEGMENT_LEN
        if stored < self.sizes.cache_size:
            return self.sizes.first_input_len - stored
        if not self.sizes.is_oldest:
            return 1
        half = max(1, self.sizes.window_size // 2)
        if self.num_positions is None:
            return half
        return max(1, min(half, self.num_positions - self.cache.get_seq_length()))

    @property
    def num_positions(self) -> int | None:
        """Positions at which an entry may be born; None: any."""
        return self.spec.context_len


class Reencoding(Method):
    """A method that re-encodes what it keeps: the logits of every step have nothing stale."""

    rows: list[Tensor]
    """[S] int64 of each row: what the last step saw."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    def reset(self) -> None:
        self.rows = []

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def join(self, others: Sequence[Self]) -> None:
        self.rows = [row for method in (self, *others) for row in method.rows]

    def state(self) -> dict[str, Tensor]:
        if not self.rows:
            return {}
        return {"seen": torch.cat(self.rows), "lens": torch.tensor([len(x) for x in self.rows])}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        if not state:
            return
        num_rows, num_seen = (state[x].numel() if x in state else 0 for x in ("lens", "seen"))
        lens = expect_tensor(state, "lens", (num_rows,), torch.int64).tolist()
        seen = expect_tensor(state, "seen", (num_seen,), torch.int64)
        longest, vocab_size = self.sizes.first_input_len, self.model.config.vocab_size
        if not (
            lens
            and sum(lens) == num_seen
            and 1 <= min(lens) <= max(lens) <= longest
            and 0 <= seen.min() <= seen.max() < vocab_size
        ):
            raise UserError(
                f"a stream's seen must be rows of ids below {vocab_size}, each of 1 to {longest}"
            )
        self.rows = list(seen.to(self.model.device).split(lens))

    def extend(self, ids: Tensor) -> list[Tensor]:
        """What each row would see with ids [B, T] more, nothing dropped."""
        if not self.rows:
            return list(ids)
        if len(ids) != len(self.rows):
            raise UserError(f"this stream has {len(self.rows)} rows, got ids of {len(ids)}")
        return [torch.cat(pair) for pair in zip(self.rows, ids, strict=True)]

    def keep(self, ids: Tensor) -> Tensor:
        """The part of ids [T] that a step sees: all, or the sinks and what is left."""
        dropped, num_sinks = self.sizes.num_dropped(len(ids) - 1), self.sizes.num_sinks
        return torch.cat([ids[:num_sinks], ids[num_sinks + dropped :]]) if dropped else ids

    @property
    def fill(self) -> int:
        return max((self.sizes.num_stored(len(row)) for row in self.rows), default=0)
