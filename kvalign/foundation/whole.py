"""Objects that change in several steps, and must not be used after one of them has failed."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvalign.foundation.errors import UserError


class Whole:
    """State of a stream, or of a part of it: whole, or left in the middle of a change.

    Attributes:
        is_changing: whether `change` is around what happens now.
    """

    def __init__(self) -> None:
        self._is_whole, self.is_changing = True, False

    def check(self) -> None:
        """Raise UserError if an exception, or Ctrl-C, came in the middle of a change."""
        if not (self._is_whole or self.is_changing):
            raise UserError(
                "this stream was interrupted inside a step and cannot continue: reset() it, or "
                "load a saved one"
            )

    def begin(self) -> None:
        """A change begins, of which nobody says so when it fails; UserError as of `check`."""
        self.check()
        self._is_whole = False

    def end(self) -> None:
        """The change has ended, or all begins anew."""
        self._is_whole = True

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around a change, which may be a part of a longer one; UserError as of `check`."""
        if self.is_changing:
            yield
            return
        self.begin()
        self.is_changing = True
        try:
            yield
            self.end()
        finally:
            self.is_changing = False
