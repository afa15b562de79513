"""Default corpus, on every machine: CPython's language reference and the library's docstrings.

Nothing is downloaded, and only a data module is imported. The reference is `pydoc_data.topics`, and
docstrings are read from the standard library's source with `ast`. The text depends a little on the
Python version. The split does not, because a document goes to `test` by a hash of its name.
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

TEST_SHARE = 0.1
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "turtledemo"}
_BLOCKS = ("body", "cases", "handlers", "orelse", "finalbody")


class PythonDocs:
    about = "CPython's language reference and docstrings; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """The documents, an empty line after each."""
        return in_pieces(row["text"] + "\n\n" for row in python_docs(split))


def python_docs(split: str) -> Iterator[dict[str, str]]:
    """Yield `{"name", "text"}` documents of `split` (`train` or `test`), in a fixed order."""
    from pydoc_data.topics import topics  # 700 kB

    of_test = split == "test"
    for topic in sorted(topics):
        name = f"topic/{topic}"
        if is_test(name) == of_test:
            yield {"name": name, "text": topics[topic]}
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sources(stdlib):
        name = f"module/{path.relative_to(stdlib).as_posix()}"
        if is_test(name) == of_test and (text := _docstrings(path)):
            yield {"name": name, "text": text}


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
