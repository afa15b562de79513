"""`kvalign`: attention sinks and a window, every kept key and value realigned by a trained aligner
(KV-Align 2024).
"""

from transformers import PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.methods.base import Cached
from kvalign.realign import Realigner, realigner_of
from kvalign.sizes import CacheSizes


class KVAlign(Cached):
    name = "kvalign"
    about = (
        "keeps sinks and a window; a trained aligner corrects keys and values after each eviction"
    )
    takes_aligner = True

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes, *, aligner: Aligner):
        self.aligner = aligner
        super().__init__(model, sizes)
        aligner.check(model, sizes)

    @property
    def aligner_name(self) -> str | None:
        return self.aligner.label

    @property
    def num_positions(self) -> int:
        return self.aligner.config.chunk_len

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model, self.aligner)
