"""Objects that are saved in their own way, not by pickle."""

from typing import ClassVar, NoReturn

from kvalign.foundation.errors import UserError


class NotPickled:
    """Base of objects that refuse pickle: they need a model that their bytes would not contain.

    Attributes:
        instead: how to save it, in a line.
    """

    instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise UserError(self.instead)
