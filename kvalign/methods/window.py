"""`window`: keep the last C entries and no sinks, the baseline that StreamingLLM is measured
against.
"""

from kvalign.methods.base import Cached
from kvalign.realign import Realigner, closed_form


class Window(Cached):
    name = "window"
    about = "keeps the last entries, no sinks"
    default_num_sinks = 0
    fixed = ("num_sinks",)

    def realigner(self) -> Realigner | None:
        return closed_form(self.model)
