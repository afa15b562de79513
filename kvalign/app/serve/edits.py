"""Edits that turn the tokens of a session into those of a conversation that a client has changed: a
message in the middle left out, shortened or rewritten.

    held       a b c d e f g h i j k         kept: a b, f g, i j k
    asked for  a b x f g i j k l m           cut c d e, put x there, cut h, and feed l m
"""

from collections.abc import Sequence
from typing import NamedTuple

RUN = 16  # tokens in a row that are taken for the same text, once some before differed


class Change(NamedTuple):
    """Tokens from `start` to `stop` of what is held become `new`."""

    start: int
    stop: int
    new: list[int]


class Edits(NamedTuple):
    """Changes of what is held, in its order; `num_kept` of its tokens stay, and as many of those
    that are asked for are held afterwards as `num_held`.
    """

    changes: list[Change]
    num_kept: int
    num_held: int

    @property
    def num_new(self) -> int:
        """Tokens that the changes bring."""
        return sum(len(change.new) for change in self.changes)


def edits_between(ids: Sequence[int], new_ids: Sequence[int]) -> Edits:
    """Edits after which `ids` are the beginning of `new_ids`, without their last token, which is to
    be fed. Tokens are kept where a run of them comes in the same order in both; each token is
    looked at once.
    """
    prefix = new_ids[:-1]
    runs: dict[tuple[int, ...], list[int]] = {}
    for j in reversed(range(len(prefix) - RUN + 1)):
        runs.setdefault(tuple(prefix[j : j + RUN]), []).append(j)  # the first is last
    changes, num_kept, i, j = list[Change](), 0, 0, 0
    while True:
        start = i
        while i < len(ids) and j < len(prefix) and ids[i] == prefix[j]:
            i, j = i + 1, j + 1
        num_kept += i - start
        run = _next_run(ids, i, runs, j)
        if run is None:
            if i < len(ids):
                changes.append(Change(i, len(ids), []))
            return Edits(changes, num_kept, j)
        changes.append(Change(i, run[0], [*prefix[j : run[1]]]))
        i, j = run


def _next_run(
    ids: Sequence[int], start: int, runs: dict[tuple[int, ...], list[int]], at_least: int
) -> tuple[int, int] | None:
    """The next place from `start` on of a run that comes `at_least` so late in the new ids,
    and where it comes there; None: there is none.
    """
    for i in range(start, len(ids) - RUN + 1):
        places = runs.get(tuple(ids[i : i + RUN]))
        while places and places[-1] < at_least:
            places.pop()
        if places:
            return i, places[-1]
    return None
