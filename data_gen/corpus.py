"""What a corpus is, and what corpora share: text in pieces, rows read through `datasets`."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from kvalign.errors import UserError

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


def load_rows(*args: Any, about: str, hint: str = "", **options: Any) -> Iterator[dict[str, Any]]:
    """The rows of `datasets.load_dataset(*args, **options)`, streaming.

    Args:
        about: what is read, for messages.
        hint: ends the messages.

    Raises:
        UserError: no such data set, configuration or split, no connection, or damaged files.
    """
    import datasets

    errors = (OSError, ValueError, datasets.exceptions.DatasetsError)
    try:
        dataset = datasets.load_dataset(*args, streaming=True, **options)
    except errors as error:
        raise UserError(f"cannot load {about}: {error}{hint}") from error

    def rows() -> Iterator[dict[str, Any]]:
        try:
            yield from dataset
        except errors as error:
            raise UserError(f"cannot read {about}: {error}{hint}") from error

    return rows()
