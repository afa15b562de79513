"""Methods whose entries stay as they were encoded. `dense` keeps everything and stops at the
context length: it is the no-eviction baseline. The others keep tokens and re-encode them:
`recompute` at every step, `discard-half` when the cache is full.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from kvalign.cache.saving import expect_tensor
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache, rows_of
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method, check_ids


class Dense(Method):
    name = "dense"
    about = "keeps everything and stops at the context length"
    default_num_sinks = 0

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    @property
    def in_words(self) -> str:
        return f"{self.title}, which keeps everything"

    @property
    def fill(self) -> int:
        return self.cache.get_seq_length()

    def num_forgotten(self, num_tokens: int) -> int:
        return 0

    def reset(self) -> None:
        # Not made from the config but of hybrids: layers that see a window keep every entry, too.
        self.cache = DynamicCache(config=self.model.config) if self.spec.states else DynamicCache()
        self._dtype = self.model.dtype

    def state(self) -> dict[str, Tensor]:
        if self.spec.states:
            return super().state()
        return {
            f"{i}.{name}": getattr(layer, name)
            for i, layer in enumerate(self.cache.layers)
            for name in ("keys", "values")
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        if state:
            length = state["0.keys"].shape[2] if "0.keys" in state else 0
            if self.tokens_left is not None and length > self.tokens_left:
                raise UserError(
                    f"a stream of {length} entries exceeds the context length of {self.spec.name}"
                )
            num_rows, spec = len(state["0.keys"]) if length else 0, self.spec
            shape = spec.of_entries(num_rows, length, spec.head_dim)

            def read(name: str) -> Tensor:
                x = expect_tensor(state, name, shape, self.model.dtype)
                return x.to(self.model.device)

            pairs = [(read(f"{i}.keys"), read(f"{i}.values")) for i in range(spec.num_layers)]
            self.cache = DynamicCache(pairs)

    def compile(self, **options: Any) -> Self:
        raise UserError("dense cannot be compiled: its steps grow with the stream")

    @property
    def tokens_left(self) -> int | None:
        limit = self.spec.context_len
        return None if limit is None else limit - self.cache.get_seq_length()

    def feed(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.model.config.vocab_size)
        if self.tokens_left is not None and ids.shape[1] > self.tokens_left:
            raise UserError(
                f"dense has room for {self.tokens_left} more tokens before the context length of "
                f"{self.spec.name} ({self.spec.context_len}), got {ids.shape[1]}: "
                "choose a streaming method"
            )
        before, now = [(layer.keys, layer.values) for layer in self.cache.layers], self.model.dtype
        if before and now != self._dtype:
            raise UserError(
                f"this stream's entries are {self._dtype}, but the model is now {now}: reset() "
                "the stream, or convert the model back"
            )
        self._dtype = now
        try:
            return self.forward(ids, self.cache)
        except BaseException:  # some of the layers may have taken them in
            self.cache = DynamicCache(before) if before else DynamicCache()
            raise


class Reencoding(Method):
    """Method that re-encodes the kept tokens, so that no entry is ever stale."""

    rows: list[Tensor]
    """[S] int64 of each row: what the last step saw."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    def reset(self) -> None:
        self.rows = []

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows_of(rows, len(self.rows))]

    def join(self, others: Sequence[Self]) -> None:
        self.check_alike(others)
        self.rows = [row for method in (self, *others) for row in method.rows]

    def state(self) -> dict[str, Tensor]:
        if not self.rows:
            return {}
        return {"seen": torch.cat(self.rows), "lens": torch.tensor([len(x) for x in self.rows])}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        self.rows = self._rows_of(state)

    def _rows_of(self, state: dict[str, Tensor]) -> list[Tensor]:
        if not state:
            return []
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
        return list(seen.to(self.model.device).split(lens))

    def extend(self, ids: Tensor) -> list[Tensor]:
        """Return the tokens that each row would see with ids [B, T] more, without evictions;
        UserError: another number of rows.
        """
        check_ids(ids, self.model.config.vocab_size)
        if not self.rows:
            return list(ids)
        if len(ids) != len(self.rows):
            raise UserError(f"this stream has {len(self.rows)} rows, got ids of {len(ids)}")
        return [torch.cat(pair) for pair in zip(self.rows, ids, strict=True)]

    def keep(self, ids: Tensor) -> Tensor:
        """The part of ids [T] that a step sees: all, or the sinks and the rest after evictions."""
        dropped, num_sinks = self.sizes.num_dropped(len(ids) - 1), self.sizes.num_sinks
        return torch.cat([ids[:num_sinks], ids[num_sinks + dropped :]]) if dropped else ids

    @property
    def fill(self) -> int:
        return max((self.sizes.num_stored(len(row)) for row in self.rows), default=0)


class Recompute(Reencoding):
    """Re-encode the last C + 1 tokens at every step. It is exact, and slower by a factor that grows
    with C. Both papers use it as the reference. It keeps no sinks (the paper's protocol);
    `num_sinks` adds them.
    """

    name = "recompute"
    about = "re-encodes the window at every step"
    default_num_sinks = 0

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [B, T]. Shorter rows are padded on the right, where no counted token looks."""
        rows = [self.keep(row) for row in self.extend(ids)]
        lens = torch.tensor([len(row) for row in rows], device=ids.device)
        ends, which = lens.unique(return_inverse=True)
        padded = pad_sequence(rows, batch_first=True)
        last = 1 if len(ends) == 1 else ends - 1
        is_full = len(ends) == 1 and padded.shape[1] == self.sizes.first_input_len
        # It has no steps of a cache: what it compiles is the model.
        model: Any = self.stepper if self.stepper is not None and is_full else self.model
        with self.in_eval_mode():
            logits = model(input_ids=padded, use_cache=False, logits_to_keep=last).logits
        logits = logits[torch.arange(len(rows)), which].float()
        self.rows = rows
        return logits


class DiscardHalf(Reencoding):
    """When the cache is full, drop half of the entries after the sinks and re-encode the rest once.

    LLM Runtime and its successor Neural Speed do this by default for all models ("discard and
    re-evaluate": github.com/intel/neural-speed/blob/main/docs/infinite_inference.md). llama.cpp
    drops the same half but re-encodes nothing. Its context shift, off by default since 2025
    (github.com/ggml-org/llama.cpp/pull/15416), rotates the keys that stay: `streaming-llm` with
    `num_evicted="half"`. The entries of `discard-half` are never stale, but a step sees only three
    quarters of the cache on average. With a smaller `num_evicted` it sees more, and re-encodes more
    often.
    """

    name = "discard-half"
    about = "drops half of the window when full and re-encodes the rest"
    default_num_evicted = "half"

    def reset(self) -> None:
        super().reset()
        self.cache = self._new_cache()

    def _new_cache(self) -> StreamingCache:
        """Cache that never evicts: it is refilled before it is full."""
        unbounded = replace(self.spec, context_len=None)
        sizes = CacheSizes(self.sizes.first_input_len, num_sinks=0)
        return StreamingCache(unbounded, sizes, config=self.model.config)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        super().select(rows)

    def join(self, others: Sequence[Self]) -> None:
        self.check_alike(others)
        self.cache.join([method.cache for method in others])
        super().join(others)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"cache.{name}": x for name, x in self.cache.state().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        rows = self._rows_of(state)
        of_cache = {name.removeprefix("cache."): x for name, x in state.items() if "." in name}
        self.cache.restore(of_cache, self.model)
        if self.cache.seen != [len(row) for row in rows]:
            self.reset()
            raise UserError("a stream's entries must be those of its tokens")
        self.rows = rows

    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [B, T]. A full row is re-encoded when it is full; the others take their step."""
        seen = self.extend(ids)
        kept_rows = [self.keep(row) for row in seen]
        with self.cache.changing():
            logits, self.cache = self._feed_rows(ids, seen, kept_rows)
            self.rows = kept_rows
        return logits

    def _feed_rows(
        self, ids: Tensor, seen: list[Tensor], kept_rows: list[Tensor]
    ) -> tuple[Tensor, StreamingCache]:
        """Logits of rows that see `seen` and keep `kept_rows`, and the cache with the kept ones."""
        full = [i for i, row in enumerate(kept_rows) if row is not seen[i]]
        others = [i for i in range(len(kept_rows)) if i not in full]
        alike = len({len(row) for row in seen}) == 1
        if not full:
            return self._step(self.cache, ids), self.cache
        if alike:
            cache = self._new_cache()
            return self._step(cache, torch.stack(kept_rows)), cache
        logits = ids.new_empty(len(kept_rows), self.model.config.vocab_size, dtype=torch.float32)
        caches = []
        if others:
            self.cache.select(others)
            logits[others] = self._step(self.cache, ids[others])
            caches.append(self.cache)
        for i in full:
            caches.append(self._new_cache())
            logits[i] = self._step(caches[-1], kept_rows[i][None])[0]
        order = others + full
        caches[0].join(caches[1:])
        caches[0].select([order.index(i) for i in range(len(kept_rows))])
        return logits, caches[0]

    def _step(self, cache: StreamingCache, ids: Tensor) -> Tensor:
        if ids.shape[1] > 1 and len(set(cache.seen)) > 1:
            for i in range(ids.shape[1]):
                logits = self._step(cache, ids[:, i : i + 1])
            return logits
        return self.step(ids, cache)
