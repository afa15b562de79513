"""Objects that are saved in a way of their own, and not by pickle."""

from typing import ClassVar, NoReturn

from kvalign.foundation.errors import UserError


class NotPickled:
    """Base of objects that refuse pickle: they work on a model that is not in their bytes, so
    pickle would give a part only.

    Attributes:
        instead: what keeps it, in a line.
    """

    instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise UserError(self.instead)
