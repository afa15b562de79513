"""Registries: names, and the location of each class, which is imported at first use.

Names can be listed, in help and at a shell's TAB, without importing the classes.
"""

import importlib
from collections import UserDict
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar, cast

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import nearest

T = TypeVar("T")


class Registry(UserDict[str, T], Generic[T]):
    """Mapping from names to objects at `module:member`.

    A notebook can add to it without a file: `METHODS["mine"] = MyMethod`.

    Args:
        what: the kind of thing, for messages: `method`.
        targets: `module:member` by name, in the order of listings.
    """

    def __init__(self, what: str, targets: Mapping[str, str]):
        super().__init__(cast(Mapping[str, T], targets))
        self.what = what

    def __getitem__(self, name: str) -> T:
        value = self.data[name]
        if isinstance(value, str):  # not imported yet
            module, _, member = value.partition(":")
            value = self.data[name] = getattr(importlib.import_module(module), member)
        return value

    def find(self, name: str) -> T:
        """Return the object of a name; UserError, with the known names, if it is unknown."""
        if name not in self:
            raise UserError(unknown(self.what, name, self))
        return self[name]


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """Message for an unknown name: `unknown method 'x'; did you mean y? (known: y, z)`."""
    names = list(names)
    near = nearest(name, names)
    hint = f"; did you mean {near}?" if near else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(names)})"
