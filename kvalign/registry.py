"""Registries: names and where the class of each is; it is imported when it is first asked for.

Names can be listed, in help and at a shell's TAB, without importing what they stand for.
"""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar, cast

from kvalign.errors import UserError

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """A mapping from names to what is defined at `module:member`.

    A notebook adds to it without a file: `METHODS["mine"] = MyMethod`.

    Args:
        what: what a name names, for messages: `method`.
        places: `module:member` by name, in the order in which they are listed.
    """

    def __init__(self, what: str, places: Mapping[str, str]):
        self.what = what
        self.places: dict[str, str | T] = dict(places)

    def __getitem__(self, name: str) -> T:
        place = self.places[name]
        if isinstance(place, str):
            module, _, member = place.partition(":")
            place = self.places[name] = cast(T, getattr(importlib.import_module(module), member))
        return place

    def __setitem__(self, name: str, value: T) -> None:
        self.places[name] = value

    def __delitem__(self, name: str) -> None:
        del self.places[name]

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def find(self, name: str) -> T:
        """What a name stands for.

        Raises:
            UserError: an unknown name; the message has the nearest and all known ones.
        """
        if name not in self.places:
            raise UserError(unknown(self.what, name, self))
        return self[name]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is none: `unknown method 'x'; did you mean y? (known: y, z)`."""
    known = list(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(known)})"
