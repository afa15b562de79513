"""A streaming cache whose window gives what it loses to a memory."""

from typing import final

from transformers import PretrainedConfig

from kvalign.aligners import TableAligner
from kvalign.cache.memory_layer import MemoryLayer
from kvalign.cache.realigner import Realigner
from kvalign.cache.recall_places import RecallPlaces
from kvalign.cache.sinks import Sinks
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec
from kvalign.models.attention import REGISTERED, install


@final
class MemoryCache(StreamingCache):
    """Sinks, a window and a memory.

    Args:
        spec, sizes: see `FixedSizeCache`.
        realigner: what keeps the entries that stay right; it must place them from their birth.
        config: of the model, whose attention hands over its queries.
        num_positions: at which an entry may be born.

    Raises:
        UserError: as of `FixedSizeCache`; a realigner or a model that does not go with it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None,
        config: PretrainedConfig,
        num_positions: int | None,
    ):
        name = spec.name or "this model"
        if spec.model_type not in REGISTERED:
            raise UserError(
                f"memory is not for {name}: {spec.model_type} models do not hand over what their "
                "attention asks for"
            )
        if realigner is None:
            raise UserError(
                f"memory is not for {name} without an aligner: nothing can place what is taken "
                "back (method kvalign does)"
            )
        seen_at_most = getattr(config, "sliding_window", None)
        if seen_at_most is not None and seen_at_most <= sizes.cache_size:
            raise UserError(
                f"memory is not for {name} with cache_size {sizes.cache_size}: its layers see "
                f"{seen_at_most} entries"
            )
        if sizes.realign_every > 1:
            raise UserError(
                f"memory takes realign_every 1: all is placed at each step, got "
                f"{sizes.realign_every}"
            )
        assert num_positions is not None
        is_free = realigner.rotation is not None
        by_age = sizes.recall_places == "age" if sizes.recall_places else is_free
        self.born = realigner.from_birth()
        aligner = getattr(self.born, "aligner", None)
        self.places = RecallPlaces(sizes, num_positions, by_age, is_free)
        if by_age and not is_free and not isinstance(aligner, TableAligner):
            raise UserError("recall_places=age on learned positions is for tables: take rank")
        super().__init__(spec, sizes, realigner)
        if not is_free:
            self.frame = self.places.frame()
        install(config)

    def _make_layers(self, num_layers: int) -> list[MemoryLayer]:
        self.sinks = Sinks(num_layers, self.sizes.num_sinks)
        of_all = self.sinks, self.sizes, self.born, self.places
        return [MemoryLayer(self, i, *of_all) for i in range(num_layers)]
