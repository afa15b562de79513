"""The default corpus, on every machine: the language reference inside CPython and the standard library's docstrings.

Nothing is imported and nothing downloaded: `pydoc_data.topics` is a data module, and docstrings are read from the
standard library's source with `ast`. The text depends a little on the Python version; the split does not, because
a document goes to `test` by a hash of its name.
"""

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

TEST_SHARE = 0.1
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "turtledemo"}


def python_docs(split: str) -> Iterator[dict[str, str]]:
    """Yield `{"name", "text"}` documents of `split` (`train` or `test`), in a fixed order."""
    for name, text in _documents():
        if _is_test(name) == (split == "test"):
            yield {"name": name, "text": text}


def _is_test(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 256 * TEST_SHARE


def _documents() -> Iterator[tuple[str, str]]:
    for name in sorted(topics):
        yield f"topic/{name}", topics[name]
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if _SKIPPED.isdisjoint(relative.parts) and not relative.name.startswith("test_"):
            text = _docstrings(path)
            if text:
                yield f"module/{relative.as_posix()}", text


def _docstrings(path: Path) -> str:
    """All docstrings of one source file, each under the signature-like name it documents."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 40:
                name = getattr(node, "name", path.stem)
                parts.append(f"{name}\n{inspect.cleandoc(doc)}")
    return "\n\n".join(parts)
