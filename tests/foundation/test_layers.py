"""No circle of imports at module level, those of annotations included, except that a cache names
the type of its memory. Which layer may import which is a contract of `pyproject.toml`, checked by
`make lint`.
"""

import ast
import graphlib
import os
from pathlib import Path

import pytest
from scripts import core_size

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


def graph_of(folder, everywhere=False):
    """What each module of a package imports of it, or inside its functions, too; the linked folders
    are part of it.
    """
    files = [
        Path(place, name)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    paths = {file.relative_to(folder.parent).with_suffix(""): file for file in files}
    modules = {".".join(p.parts).removesuffix(".__init__"): file for p, file in paths.items()}
    trees = {name: ast.parse(file.read_text()) for name, file in modules.items()}
    bodies = {name: ast.walk(tree) if everywhere else tree.body for name, tree in trees.items()}
    return {
        name: set(imports_of(body, modules)) & modules.keys() - {name}
        for name, body in bodies.items()
    }


def test_no_circle_at_module_level():
    graph = graph_of(Path(kvalign.__file__).parent)
    names = {f"kvalign.{x}" for x in ("cache.streaming_cache", "eval.report.page", "app.cli.main")}
    assert names < graph.keys()
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.slow
def test_no_circle_in_the_core_inside_functions_or_for_types():
    core, graph = core_size.modules().keys(), graph_of(Path(kvalign.__file__).parent, True)
    graphlib.TopologicalSorter({name: graph[name] & core for name in core}).prepare()


def test_a_circle_is_noticed(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.py").write_text(f"from {tmp_path.name} import {other}\n")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph_of(tmp_path)).prepare()
