"""`kvalign`: sinks and a window whose entries a trained aligner realigns (KV-Align 2024)."""

from transformers import PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.aligners.kinds import often
from kvalign.cache.realign import realigner_of
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.methods.cached import Cached


class KVAlign(Cached):
    name = "kvalign"
    about = (
        "keeps sinks and a window; a trained aligner corrects keys and values for their new "
        "positions"
    )
    takes_aligner = True

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes, *, aligner: Aligner):
        if sizes.positions == "keep":
            raise UserError(
                "positions=keep leaves entries at their original positions, so there is "
                "nothing to align: use method streaming-llm"
            )
        self.aligner = aligner
        super().__init__(model, sizes)
        aligner.check(self.model, sizes)
        if sizes.realign_every > 1 and self.cache.realigner.frame(sizes, None) != sizes:
            raise UserError("realign_every must be 1: a table on rotary keys moves nothing")
        self.aligner_name = often(aligner.label, sizes.realign_every)

    @property
    def num_positions(self) -> int:
        return self.aligner.config.chunk_len

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model, self.aligner, self.sizes.cache_size)
