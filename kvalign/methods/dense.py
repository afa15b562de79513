"""`dense`: keep everything and stop at the context length. It is the no-eviction baseline."""

from typing import Any, Self

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvalign.cache.layer import expect_tensor
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.input_ids import check_ids


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
            shape = (num_rows, spec.num_kv_heads, length, spec.head_dim)

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
