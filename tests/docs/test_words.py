"""Limits of what people read: README's length, the width of pages, and how docstrings begin."""

import ast
import re

import pytest
from helpers.doc_pages import ROOT, blocks, lines_of

from kvalign.app.cli.main import main
from kvalign.app.serve.settings import ServeSettings
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import FAMILIES

PACKAGES = ("kvalign", "training", "eval", "data_gen", "docs", "examples")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "eval/results").glob("*.md")]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# A docstring names a thing or says what is returned: no half of a sentence.
OPENINGS = re.compile(r"\s*(What|Whether|How|Of|If|By|Where|Which|Why|Who|From|As|So)\b")


def widths(text):
    """Yield number and line of the prose of a page: neither code nor tables, which cannot wrap."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "<!--")):
            yield number, line


def test_readme_is_read_in_two_minutes():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100] == []


def test_readme_counts_what_there_is():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{len(METHODS)} methods]" in text and f"[{len(FAMILIES)} architectures]" in text


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_are_short(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 150


def test_lines_of_pages_fit():
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in widths(page.read_text(encoding="utf-8"))
        if len(line) > 120
    ]
    assert long == []


def test_docstrings_begin_with_a_noun_or_return():
    wrong = []
    for path in (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED) and OPENINGS.match(ast.get_docstring(node) or ""):
                wrong.append(f"{path.relative_to(ROOT)}:{node.body[0].lineno}")
    assert wrong == []


CORE = ("aligners", "cache", "memory", "methods", "models", "policies", "steppers", "streaming")
BY_NAME = re.compile(r"\[str, Tensor\]")  # tensors whose names say what they are
SHAPE, ERROR = (
    re.compile(r"\[|[Aa]s of `|Same|see `|as `"),
    re.compile(r"UserError|[Ee]rrors|[Aa]s of `"),
)


def documented(node, public=True):
    """Public functions and methods below a node that have a docstring of their own, and it."""
    for one in ast.iter_child_nodes(node):
        is_public = public and not getattr(one, "name", "_").startswith("_")
        if isinstance(one, ast.ClassDef):
            yield from documented(one, is_public)
        elif isinstance(one, ast.FunctionDef) and is_public and (doc := ast.get_docstring(one)):
            yield one, doc


def test_docstrings_of_the_core_show_shapes_and_say_what_is_raised():
    """Of public functions that take or return tensors, or that raise UserError."""
    wrong = []
    for path in (path for name in CORE for path in sorted((ROOT / "kvalign" / name).rglob("*.py"))):
        for one, doc in documented(ast.parse(path.read_text(encoding="utf-8"))):
            types = [x.annotation for x in (*one.args.args, *one.args.kwonlyargs)] + [one.returns]
            words = " ".join(BY_NAME.sub("", ast.unparse(x)) for x in types if x is not None)
            has_tensors = re.search(r"\bTensor\b", words) is not None
            raises = "raise UserError" in ast.unparse(one)
            if has_tensors > bool(SHAPE.search(doc)) or raises > bool(ERROR.search(doc)):
                wrong.append(f"{path.relative_to(ROOT)}:{one.lineno}")
    assert wrong == []


@pytest.mark.slow
def test_readme_shows_what_its_first_command_and_its_python_print(monkeypatch, capsys):
    shell, shown, code = blocks("README.md")[1:4]
    assert (shell.language, shown.language, code.language) == ("bash", "text", "python")
    _, (_, *words) = lines_of(shell.text)
    assert main([word.replace("500", "90") for word in words]) == 0
    printed = capsys.readouterr()
    first, mark, last = shown.text.splitlines()
    assert printed.out.startswith(first) and mark in printed.err
    assert last.replace("500", "90").partition(": ")[0] in printed.err
    smaller = code.text.replace("max_new_tokens=2000", "max_new_tokens=40")
    assert smaller != code.text
    exec(compile(smaller, "README.md", "exec"), {})
    assert (words[-1] + capsys.readouterr().out).startswith(first)


def test_a_release_is_told_in_40_lines():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, *releases = re.split(r"^## ", text, flags=re.MULTILINE)
    assert all(len(release.strip().splitlines()) <= 40 for release in releases)
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version and any(release.startswith(f"[{version[1]}] - ") for release in releases)


def test_the_threat_model_says_who_is_trusted_with_what():
    """All who have a part, and nothing that is not there."""
    text = (ROOT / "SECURITY.md").read_text()
    model = text.partition("## Threat model")[2].partition("\n## ")[0]
    assert model and model.count("\n") <= 60
    for who in ("Folders of models", "Files of streams", "Prompts, messages", "Clients"):
        assert f"**{who}" in model
    assert model.count("Promised: ") >= 3 and model.count("Not promised: ") >= 2
    flags = set(re.findall(r"`(--[a-z-]+)", text))
    assert flags and flags <= ServeSettings.flags()
