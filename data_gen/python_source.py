"""Source code as text: that of Python's library and of the packages that are installed here.

Nothing is downloaded or imported. A package goes to `train` or `test` as a whole, by a hash of its
name, so no file of the one was seen in the other. Copies of other packages inside a package are
left out. Files come in the order of a hash of their paths: the first tokens are of many packages.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from kvalign.data_gen.corpus import in_pieces
from kvalign.data_gen.python_docs import SKIPPED, is_test, sources
from kvalign.foundation.errors import UserError

MOST_BYTES = 100_000  # of a file: larger ones are mostly tables
_COPIES = ("vendor", "third_party", "thirdparty", "externals")  # in a name


class PythonSource:
    """The corpora `python-source` and `python-source:MB`."""

    about = "source code of Python and of installed packages, or so many MB of it; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """The files, an empty line after each; `rest`: up to so many megabytes.

        Raises:
            UserError: not a number of megabytes.
        """
        num_chars = None
        if rest:
            try:
                num_chars = int(1e6 * float(rest))
            except (ValueError, OverflowError):
                num_chars = 0
            if num_chars <= 0:
                raise UserError(f"python-source:MB takes a number of megabytes, got {rest!r:.80}")
        return in_pieces(_first(num_chars, split))


def files_of(split: str) -> dict[str, Path]:
    """The files of `train` or `test` by their names, of which the package is the first part; in
    order.
    """
    of_test, found = split == "test", dict[str, Path]()
    for root in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))):
        for package in Path(root).iterdir():
            if is_test(f"package/{package.stem}") == of_test and package.name not in SKIPPED:
                paths = sources(package) if package.is_dir() else [package]
                for path in paths:
                    name = f"{package.name}{path.as_posix().removeprefix(package.as_posix())}"
                    if name.endswith(".py") and not any(word in name for word in _COPIES):
                        found.setdefault(name, path)
    return dict(sorted(found.items(), key=lambda x: hashlib.sha256(x[0].encode()).digest()))


def _first(num_chars: int | None, split: str) -> Iterator[str]:
    """Texts of the files of a part, until there are so many characters."""
    for path in files_of(split).values():
        if path.stat().st_size > MOST_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            continue
        yield f"{text}\n\n"[:num_chars]
        if num_chars is not None and (num_chars := num_chars - len(text) - 2) <= 0:
            return
