"""No circle of imports at module level, those of annotations included, except that a cache names
the type of its memory. Which layer may import which is a contract of `pyproject.toml`, checked by
`make lint`.
"""

import ast
import graphlib
import os
from pathlib import Path

import pytest

import kvalign

TYPES = {"kvalign.memory.memories"}


def imports_of(body, modules):
    """The modules that statements import when they run, or, but for `TYPES`, for type checkers."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from {*imports_of(node.body, modules)} - TYPES
        elif isinstance(node, ast.Try | ast.If):
            yield from imports_of(node.body, modules)


def graph_of(folder):
    """What each module of a package imports of it; the linked folders are part of it."""
    files = [
        Path(place, name)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    paths = {file.relative_to(folder.parent).with_suffix(""): file for file in files}
    modules = {".".join(p.parts).removesuffix(".__init__"): file for p, file in paths.items()}
    return {
        name: set(imports_of(ast.parse(file.read_text()).body, modules)) & modules.keys() - {name}
        for name, file in modules.items()
    }


def test_no_circle_at_module_level():
    graph = graph_of(Path(kvalign.__file__).parent)
    names = {f"kvalign.{x}" for x in ("cache.streaming_cache", "eval.report.page", "app.cli.main")}
    assert names < graph.keys()
    graphlib.TopologicalSorter(graph).prepare()


def test_a_circle_is_noticed(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.py").write_text(f"from {tmp_path.name} import {other}\n")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph_of(tmp_path)).prepare()
