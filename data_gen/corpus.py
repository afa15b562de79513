"""What a corpus is, and how its rows become pieces of text."""

from collections.abc import Iterable, Iterator
from typing import Protocol

PIECE_LEN = 1 << 20  # characters in memory at once


class Corpus(Protocol):
    """A source of text: a class in a file of its own, a line in `corpora.py`."""

    @property
    def about(self) -> str:
        """Half a line for `kvalign corpora`."""

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """The text in pieces of about `PIECE_LEN`. What a user can mend is raised by the call
        itself, before the first piece, where it can be known by then.

        Args:
            rest: of the specification, after the colon; empty where there is none.
            split: `train` or `test`.
        """


def in_pieces(rows: Iterable[str]) -> Iterator[str]:
    """Join rows to pieces of `PIECE_LEN` or more, each but the last ending where a line ends."""
    piece: list[str] = []
    piece_len = 0
    for row in rows:
        piece.append(row)
        piece_len += len(row)
        if piece_len >= PIECE_LEN and row.endswith("\n"):
            yield "".join(piece)
            piece, piece_len = [], 0
    if piece:
        yield "".join(piece)
