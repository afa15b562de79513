"""The examples run, with fewer tokens, and stay short; the notebook runs top to bottom."""

from pathlib import Path

import nbformat
import pytest
from helpers.doc_pages import PAGES
from helpers.smaller import INSIDE, SMALLER_PYTHON, smaller_python
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "how_a_kv_cache_streams.ipynb"
MARKS = dict.fromkeys(("other_caches", "serve_sessions"), pytest.mark.slow)


@pytest.mark.parametrize(
    "path", [pytest.param(x, marks=MARKS.get(x.stem, ()), id=x.stem) for x in SCRIPTS]
)
def test_script_runs(path, tmp_path, monkeypatch, capsys):
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", [str(path)])
    exec(compile(smaller_python(path.read_text()), path, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_short(path):
    assert len(path.read_text().splitlines()) <= 40


# What nbclient's own event loop, and the kernel's ports without encryption, complain about.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells), "it is kept with its outputs"
    for cell in notebook.cells:
        cell.source = smaller_python(cell.source)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def test_nothing_is_made_smaller_that_is_not_there():
    paths = [*SCRIPTS, NOTEBOOK, *(ROOT / page for page in PAGES)]
    text = "".join(path.read_text() for path in paths)
    assert [large for large in SMALLER_PYTHON if large not in text] == []


def test_the_notebook_shows_what_it_prints_alone():
    """No warnings of the machine that it ran on."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    outputs = [x for cell in cells for x in cell.get("outputs", [])]
    assert outputs and not [x for x in outputs if x.get("name") == "stderr"]
