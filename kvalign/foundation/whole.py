"""Objects that hold a stream: not used after one of their changes failed, and not pickled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, NoReturn

from kvalign.foundation.errors import UserError


class Whole:
    """State of a stream, or of a part of it: complete, or left in the middle of a change.

    Attributes:
        is_changing: whether a `change` is in progress.
    """

    def __init__(self) -> None:
        self._is_whole, self.is_changing = True, False

    def check(self) -> None:
        """Raise UserError if an exception or Ctrl-C interrupted a change."""
        if not (self._is_whole or self.is_changing):
            raise UserError(
                "this stream was interrupted within a step and cannot continue: reset() it, or "
                "load a saved one"
            )

    def begin(self) -> None:
        """Begin a change whose failure nobody reports; UserError as of `check`."""
        self.check()
        self._is_whole = False

    def end(self) -> None:
        """End the change, or start again from the beginning."""
        self._is_whole = True

    @contextmanager
    def change(self, undo: Callable[[], object] | None = None) -> Iterator[None]:
        """Context for a change, which may be part of a longer one; UserError as of `check`.

        Args:
            undo: called when it fails, to start again from the beginning.
        """
        if self.is_changing:
            yield
            return
        self.check()
        self._is_whole, self.is_changing = False, True
        try:
            yield
            self._is_whole = True
        except BaseException:
            if undo is not None:
                undo()
            raise
        finally:
            self.is_changing = False


class NotPickled:
    """Base of objects that refuse pickle: they need a model that their bytes would not contain.

    Attributes:
        instead: how to save it, in a line.
    """

    instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise UserError(self.instead)
