"""The doctor answers whatever is missing or broken, says what to do, and fails only for what is
required.
"""

import importlib
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from helpers.hub_cache import put_into_cache
from packaging.requirements import Requirement

from kvalign import checkpoints
from kvalign.app.cli.main import main
from kvalign.app.commands import doctor as checks
from kvalign.app.commands.doctor import examine, how_to_install, is_fit, requirements
from kvalign.data_gen.corpus import HUB
from kvalign.models import fetched

BASE = {needed.name for extra, needed in requirements() if not extra}
EXTRAS = {needed.name: extra for extra, needed in requirements() if extra}
# Packages whose module is called otherwise.
MODULES = {"english-words": "english_words", "pyyaml": "yaml"}


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch, offline):
    """No hub, an empty cache of it, nothing that was fetched, and a folder of its own."""
    monkeypatch.setenv(fetched.MOVED_BY, str(tmp_path / "fetched"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def install(monkeypatch, versions):
    """Let packages be of these versions, None: not installed."""
    known = checks.installed
    monkeypatch.setattr(
        "kvalign.app.commands.doctor.installed",
        lambda name: versions[name] if name in versions else known(name),
    )


def by_name(group=""):
    return {check.name: check for check in examine() if check.group.startswith(group)}


def test_packages_are_those_of_the_metadata():
    required = [text for text in metadata.requires("kvalign") if 'extra == "dev"' not in text]
    named = {Requirement(text).name for text in required}
    assert set(by_name("packages")) == named | {"kvalign", "python"}
    assert {"torch", "transformers", "huggingface_hub"} < BASE
    assert EXTRAS["lightning"] == "train" and EXTRAS["nltk"] == "eval" and EXTRAS["ray"] == "ray"
    assert how_to_install("nltk") == "pip install 'kvalign[eval]'"


def test_what_is_not_ok_says_what_to_do():
    found = examine()
    assert is_fit(found)
    assert all(bool(check.todo) == (check.state != "ok") for check in found)
    assert all(check.found for check in found)


def test_text_has_a_line_each_and_json_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fit"] is True
    assert main(["doctor"]) == 0
    *groups, last = capsys.readouterr().out.split("\n\n")
    shown = []
    for lines in map(str.splitlines, groups):
        shown += [(lines[0].strip(), *line.split()[:2]) for line in lines[1:]]
    assert shown == [
        (check["group"], check["state"], check["name"].split()[0]) for check in document["checks"]
    ]
    assert len({lines.splitlines()[0] for lines in groups}) == len(groups)
    assert last.startswith("everything required is here; optional, but not ok: ")


@pytest.mark.slow
def test_without_any_extra(monkeypatch, capsys):
    """Nothing that an extra brings can be imported: it is missing, and nothing fails."""
    install(monkeypatch, dict.fromkeys(EXTRAS))
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, MODULES.get(name, name), None)
    monkeypatch.delitem(sys.modules, "kvalign.eval.judging.words", raising=False)
    assert main(["doctor"]) == 0
    lines = [line.strip().split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    for name, extra in EXTRAS.items():
        assert ["missing", name, f"not installed: pip install 'kvalign[{extra}]'"] in lines
    said = "datasets is not installed: pip install 'kvalign[data]'"
    assert ["missing", "wikitext", said] in lines
    assert not any(line[:1] == ["wrong"] for line in lines)


def test_transformers_must_be_in_the_supported_range(monkeypatch, capsys):
    (needed,) = (needed for _, needed in requirements() if needed.name == "transformers")
    bounds = {limit.operator: limit.version for limit in needed.specifier}
    states = {bounds[">="]: "ok", "4.57.1": "wrong", bounds["<"]: "wrong", None: "missing"}
    for version, state in states.items():
        install(monkeypatch, {"transformers": version})
        assert main(["doctor", "--json"]) == int(state != "ok")
        document = json.loads(capsys.readouterr().out)
        (check,) = (c for c in document["checks"] if c["name"] == "transformers")
        assert (check["state"], document["fit"]) == (state, state == "ok")
        assert check["todo"] == ("" if state == "ok" else f"pip install '{needed}'")
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("required, but not ok: transformers; optional")


def test_a_shipped_model_without_its_weights_is_wrong(tmp_path, monkeypatch):
    shutil.copytree(checkpoints.FOLDER, tmp_path / "shipped")
    (tmp_path / "shipped" / "llama-mini" / "model.safetensors").unlink()
    monkeypatch.setattr(checkpoints, "FOLDER", tmp_path / "shipped")
    found = examine()
    (check,) = (check for check in found if check.name == "llama-mini")
    assert check.state == "wrong" and check.required and not is_fit(found)


def test_a_corpus_is_at_hand_in_a_folder_or_through_the_hub(tmp_path, monkeypatch):
    found = by_name("corpora")
    assert {name for name, check in found.items() if check.state == "ok"} == {"python-docs"}
    assert {name for name, check in found.items() if check.state == "missing"} == {*HUB}
    assert "./Salesforce/wikitext" in found["wikitext"].todo
    (tmp_path / "own").mkdir()
    at = put_into_cache(tmp_path / "hub", "Salesforce/wikitext", tmp_path / "own", "dataset")
    assert by_name("corpora")["wikitext"].found == f"in the hub's cache ({at})"
    Path("Salesforce/wikitext").mkdir(parents=True)
    assert by_name("corpora")["wikitext"].found == "in the folder Salesforce/wikitext"
    monkeypatch.setattr("kvalign.foundation.hub.is_reachable", lambda: True)
    assert {check.state for check in by_name("corpora").values()} == {"ok"}


def test_word_list_is_the_pinned_one(monkeypatch):
    words = importlib.import_module("kvalign.eval.judging.words")
    (check,) = by_name("word lists").values()
    assert check.state == "ok" and words.SHA256 in check.found
    monkeypatch.setattr(words, "SHA256", "0" * 64)
    words.load_words.cache_clear()
    (check,) = by_name("word lists").values()
    assert check.state == "wrong" and "english-words==2.0.2" in check.todo
    install(monkeypatch, {"english-words": None})
    (check,) = by_name("word lists").values()
    assert check.state == "missing"
