"""A streaming cache that forgets nothing at once: what its window loses goes to a memory."""

from typing import final

from kvalign.cache.memory_layer import MemoryLayer
from kvalign.cache.realigner import Realigner
from kvalign.cache.sinks import Sinks
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec
from kvalign.models.attention import REGISTERED, install
from transformers import PretrainedConfig


@final
class MemoryCache(StreamingCache):
    """Sinks, a window and a memory; arguments and errors as of `FixedSizeCache`."""

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None,
        config: PretrainedConfig,
    ):
        name = spec.name or "this model"
        if spec.model_type not in REGISTERED:
            raise UserError(
                f"memory is not for {name}: the attention of {spec.model_type} models does not "
                "hand over its queries"
            )
        if realigner is None:
            raise UserError(
                f"memory is not for {name} without an aligner: nothing can place what is taken back"
            )
        if sizes.realign_every > 1:
            raise UserError(
                f"memory places entries at each step: realign_every must be 1, got "
                f"{sizes.realign_every}"
            )
        if getattr(config, "sliding_window", None) is not None:
            raise UserError(f"memory is read by attention over all entries; layers of {name} see a window")
        self.born = realigner.from_birth()
        install(config)
        super().__init__(spec, sizes, realigner)

    def _make_layers(self, num_layers: int) -> list[MemoryLayer]:
        self.sinks = Sinks(num_layers, self.sizes.num_sinks)
        return [MemoryLayer(self, i, self.sinks, self.sizes, self.born) for i in range(num_layers)]
