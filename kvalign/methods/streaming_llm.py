"""`streaming-llm`: attention sinks and a window (Xiao et al. 2024); `window`: no sinks.

Rotary keys keep their distances, ALiBi works by place, learned positions stay stale. On a
rotary model with `num_evicted="half"` this keeps and moves the same entries as llama.cpp's context
shift (`--context-shift`, `--keep` for the sinks; off by default since 2025). With a smaller number
it equals LLM Runtime's shift-RoPE-K (`n_discard`). Without rotary positions llama.cpp shifts
nothing, and its entries stay stale, too.
"""

from kvalign.cache.realign import realigner_of
from kvalign.cache.realigner import Realigner
from kvalign.methods.cached import Cached


class StreamingLLM(Cached):
    name = "streaming-llm"
    about = (
        "keeps sinks and a window; rotary keys keep their distances, learned positions become stale"
    )

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model)


class Window(StreamingLLM):
    """The last C entries and no sinks, the baseline of the StreamingLLM paper."""

    name = "window"
    about = "keeps the last entries, no sinks"
    default_num_sinks = 0
    fixed = ("num_sinks",)
