"""What one request asks of the engine, and the states of rows that are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.row import Row
from kvalign.cache.base import FixedSizeCache
from kvalign.methods.base import Method

State = dict[str, Tensor]


@dataclass(eq=False)
class Turn:
    """What one request asks of the engine: to take in tokens and to answer, once or several times.

    Attributes:
        method: one that has been fed nothing; it is the turn's own.
        state: what it takes up first; None: it begins.
        left: [T] int64, what is still to be fed, T >= 1 at first.
        rows: the answers; rows of one turn are drawn from one prompt.
        ended: told of an answer that is whole, and of the state of a method that has been fed all
            but its last token; of None where `keeps` is False.
        failed: told why the answers of this turn end.
        keeps: whether the state after a whole answer is wanted.
        is_cancelled: set by whoever waits no longer; its rows go before the next step.
    """

    method: Method
    state: State | None
    left: Tensor
    rows: Sequence[Row]
    ended: Callable[[Row, State | None], None]
    failed: Callable[[RequestError], None]
    keeps: bool
    is_cancelled: bool = False


def states_of(batch: Method, rows: list[int]) -> list[State]:
    """What some rows of a batch are, each alone; the batch stays as it is."""
    if not rows:
        return []
    several, states = batch.new(), []
    several.join([batch])
    several.select(rows)
    for i in range(len(rows)):
        one = batch.new()
        one.join([several])
        one.select([i])
        states.append(one.state())
        free(one)
    free(several)
    return states


def free(method: Method) -> None:
    """Let go of the memory of one that is done with, at once: a cache and its layers know each
    other, and would be found by the garbage collector much later.
    """
    cache = getattr(method, "cache", None)
    if isinstance(cache, FixedSizeCache):
        cache.reset()
