"""`kvalign`: attention sinks and a window, every kept key and value realigned by a trained aligner
(KV-Align 2024).
"""

from typing import Any

from transformers import PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.methods.base import Cached
from kvalign.realign import Realigner, trained


class KVAlign(Cached):
    name = "kvalign"
    about = (
        "keeps sinks and a window; a trained aligner corrects keys and values after each eviction"
    )
    takes_aligner = True

    def __init__(self, model: PreTrainedModel, *, aligner: Aligner, **sizes: Any):
        self.aligner = aligner
        if sizes.get("num_sinks") is None:
            sizes["num_sinks"] = aligner.config.num_sinks
        super().__init__(model, **sizes)
        aligner.check(model, self.cache_size, self.num_sinks, self.num_evicted)

    @property
    def aligner_name(self) -> str | None:
        return self.aligner.label

    @property
    def num_positions(self) -> int:
        return self.aligner.config.chunk_len

    def realigner(self) -> Realigner | None:
        return trained(self.model, self.aligner)
