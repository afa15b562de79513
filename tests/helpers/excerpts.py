"""Excerpts of the code for pages: the source of a class, function or method."""

import ast
from functools import lru_cache
from pathlib import Path
from textwrap import dedent

from helpers.doc_pages import ROOT
from kvalign.foundation.errors import UserError


def excerpt(name: str) -> str:
    """The file of `kvalign.module.name` as a link for a page in docs/, and the source below it,
    without its docstring.

    Raises:
        UserError: there is no such module, or nothing of that name in it.
    """
    file, rest = _file_of(name)
    text, nodes = _parsed(file)
    node = None
    for part in rest:
        named = [one for one in nodes if getattr(one, "name", None) == part]
        if not named:
            raise UserError(f"{name}: {file.as_posix()} has no {'.'.join(rest)}")
        node, nodes = named[-1], getattr(named[-1], "body", [])
    assert isinstance(node, ast.ClassDef | ast.FunctionDef), name
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        del lines[docstring.lineno - first : docstring.end_lineno - first + 1]
        if not lines[docstring.lineno - first].strip():
            del lines[docstring.lineno - first]
    code = dedent("\n".join(lines))
    path, title = file.as_posix(), ".".join(rest)
    return f"[`{path}`](../{path}), `{title}`:\n\n```python\n{code}\n```\n"


def _file_of(name: str) -> tuple[Path, list[str]]:
    """The module's file, where it lies in the repository, and the names below the module."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.resolve().relative_to(ROOT), parts[length:]
    raise UserError(f"{name}: no such module")


@lru_cache
def _parsed(file: Path) -> tuple[str, list[ast.stmt]]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, ast.parse(text).body
