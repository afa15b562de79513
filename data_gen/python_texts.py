"""Corpora that are on every machine. Nothing is downloaded, and only a data module is imported.

The default is CPython's language reference, from `pydoc_data.topics`, and the library's docstrings,
read from its source with `ast`. The text depends a little on the Python version. The split does
not, because a document goes to `test` by a hash of its name.

Source code is that of Python's library and of the packages that are installed here. A package goes
to `train` or `test` as a whole, so no file of the one was seen in the other. Copies of other
packages inside a package are left out. Files come in the order of a hash of their paths: the first
tokens are of many packages.
"""

import ast
import hashlib
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvalign.data_gen.corpus import in_pieces
from kvalign.foundation.errors import UserError

TEST_SHARE = 0.1
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "turtledemo"}
MOST_BYTES = 100_000  # of a file of source code: larger ones are mostly tables
_COPIES = ("vendor", "third_party", "thirdparty", "externals")  # in a name
_BLOCKS = ("body", "cases", "handlers", "orelse", "finalbody")


class PythonDocs:
    about = "CPython's language reference and docstrings; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """The documents, an empty line after each."""
        return in_pieces(f"{text}\n\n" for text in python_docs(split))


def python_docs(split: str) -> Iterator[str]:
    """Yield the documents of `split` (`train` or `test`), in a fixed order."""
    from pydoc_data.topics import topics  # 700 kB

    of_test = split == "test"
    for topic in sorted(topics):
        if is_test(f"topic/{topic}") == of_test:
            yield topics[topic]
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sources(stdlib):
        name = f"module/{path.relative_to(stdlib).as_posix()}"
        if is_test(name) == of_test and (text := _docstrings(path)):
            yield text


def is_test(name: str) -> bool:
    """Return whether what is called so belongs to the part `test`, by a hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 * TEST_SHARE


def sources(root: Path) -> list[Path]:
    """Return the source files in a folder, in order, without tests; packages that are installed
    below the library are not listed.
    """
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(path for path in paths if not path.name.startswith("test_"))


@cache  # a command with several readers of the corpus parses the library once
def _docstrings(path: Path) -> str:
    """The longer docstrings of one source file, each under the name of what it documents."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes: errors under -W error, and lost text
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    parts = []
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 40:
                parts.append(f"{getattr(node, 'name', path.stem)}\n{inspect.cleandoc(doc)}")
    return "\n\n".join(parts)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The tree's nodes in the order of `ast.walk`, without expressions: they are most of it."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        yield node
        for block in _BLOCKS:
            nodes += getattr(node, block, ())


class PythonSource:
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
