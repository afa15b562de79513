"""Registries: names, and the location of each class, which is imported at first use.

Names can be listed, in help and at a shell's TAB, without importing the classes.
"""

import ast
import importlib
import importlib.util
from collections import UserDict
from collections.abc import Iterable, Mapping
from pathlib import Path
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

    def about(self, name: str) -> str:
        """Return the `about` of a class: from its source until it is imported, which may take
        seconds.
        """
        target = self.data[name]
        if isinstance(target, str):
            module, _, member = target.partition(":")
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.origin is not None:
                lines = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
                own = (x.body for x in lines if isinstance(x, ast.ClassDef) and x.name == member)
                for line in next(own, []):
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "about":
                        return str(ast.literal_eval(line.value))
        return str(self[name].about)  # type: ignore[attr-defined]

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
