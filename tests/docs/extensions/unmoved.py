"""`unmoved`: attention sinks and a window, every entry left as it was computed."""

from kvalign.methods.cached import Cached
from kvalign.realign import Realigner


class Unmoved(Cached):
    name = "unmoved"
    about = "keeps sinks and a window and moves nothing"

    def realigner(self) -> Realigner | None:
        return None
