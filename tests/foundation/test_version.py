"""The version is one: of the package, of the citation and of the newest release."""

import re
import tomllib
from pathlib import Path

import yaml

import kvalign
from kvalign.eval.protocol import document

ROOT = Path(__file__).parents[2]


def test_it_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kvalign.__version__ == project["version"]


def test_the_citation_names_the_release_and_its_day():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(
        r"^## \[(\d.*)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert newest and (citation["version"], str(citation["date-released"])) == newest.groups()
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (bibtex,) = re.findall(r"^```bibtex\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert f"version = {{{citation['version']}}}" in bibtex
    assert all(one["value"] in bibtex for one in citation["identifiers"])


def test_results_of_an_installed_package_name_it(tmp_path, monkeypatch):
    monkeypatch.delenv("KVALIGN_COMMIT", raising=False)
    monkeypatch.setattr("kvalign.__file__", str(tmp_path / "kvalign" / "__init__.py"))
    commit = document.environment(None)["commit"]
    assert commit == f"none: kvalign {kvalign.__version__}, installed"
