"""`streaming-llm`: attention sinks and a window (Xiao et al. 2024).

Rotary keys keep their distances, ALiBi goes by place, learned positions stay stale. On a rotary
model with `num_evicted="half"` this is what llama.cpp's context shift keeps and moves
(`--context-shift`, `--keep` for the sinks; off by default since 2025), and with a smaller number
LLM Runtime's shift-RoPE-K (`n_discard`). Where positions are not rotary, llama.cpp has nothing to
shift and the entries stay stale there, too.
"""

from kvalign.cache.realign import realigner_of
from kvalign.cache.realigner import Realigner
from kvalign.methods.cached import Cached


class StreamingLLM(Cached):
    name = "streaming-llm"
    about = "keeps sinks and a window; rotary keys keep their distances, learned positions go stale"

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model)
