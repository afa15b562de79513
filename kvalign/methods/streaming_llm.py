"""`streaming-llm`: attention sinks and a window (Xiao et al. 2024).

Rotary keys keep their distances, ALiBi goes by place, learned positions stay stale. On a rotary
model with `num_evicted` above 1 this is also the shift of keys that LLM runtimes offer.
"""

from kvalign.methods.base import Cached
from kvalign.realign import Realigner, realigner_of


class StreamingLLM(Cached):
    name = "streaming-llm"
    about = "keeps sinks and a window; rotary keys keep their distances, learned positions go stale"

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model)
