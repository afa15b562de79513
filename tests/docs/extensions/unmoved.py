"""`unmoved`: attention sinks and a window, every entry left as it was computed."""

from kvalign.cache.realigner import Realigner
from kvalign.methods.cached import Cached


class Unmoved(Cached):
    name = "unmoved"
    about = "keeps sinks and a window and moves nothing"

    def realigner(self) -> Realigner | None:
        return None
