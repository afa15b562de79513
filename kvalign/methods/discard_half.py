"""`discard-half`: when the cache is full, drop half of the entries after the sinks and re-encode
the rest once.

LLM Runtime and its successor Neural Speed do this by default for all models ("discard and
re-evaluate": github.com/intel/neural-speed/blob/main/docs/infinite_inference.md). llama.cpp drops
the same half but re-encodes nothing. Its context shift, off by default since 2025
(github.com/ggml-org/llama.cpp/pull/15416), rotates the keys that stay: `streaming-llm` with
`num_evicted="half"`. The entries of `discard-half` are never stale, but a step sees only three
quarters of the cache on average.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.methods.reencoding import Reencoding


class DiscardHalf(Reencoding):
    name = "discard-half"
    about = "drops half of the window when full and re-encodes the rest"
    default_num_evicted = "half"
    fixed = ("num_evicted",)

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
        """Read ids. A full row is re-encoded when it is full; the others take their step."""
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
