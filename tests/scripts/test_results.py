"""Results: README's and the pages' tables are those of the documents, which are of today's form and
of clean commits; and the mechanism rebuilds one of them from nothing.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.result_parts import (
    RESULTS,
    ROOT,
    check_texts,
    faults,
    parts,
    text_sources,
)
from helpers.result_tables import PAGES, filled, lacking, markdown, marked
from helpers.smaller import output_of

from kvalign import checkpoints
from kvalign.eval.report import archive_of
from kvalign.foundation.errors import UserError
from scripts import results


def to_make():
    """The documents that the index of results calls those to be made again."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8").partition("## To be made again")[2]
    parts = re.findall(r"^- ([\w-]+): (.+?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL)
    return {f"{part}/{name}" for part, names in parts for name in re.findall(r"[\w-]+", names)}


@pytest.mark.slow
def test_documents_are_of_today_of_clean_commits_and_of_their_commands():
    """All but those that are to be made again."""
    commands = {
        f"{name}/{cell.name}": cell.command
        for name, part in parts().items()
        for cell in results.cells(name, part, results.ResultsSettings())
        if not cell.is_preparation
    }
    for part in parts():
        for step in parts()[part].frozen:
            is_script = step.command.startswith("python ")
            commands[f"{part}/{step.name}"] = "kvalign " * (not is_script) + step.command
    documents = {
        f"{part}/{name}": document
        for part in parts()
        for name, document in archive_of(RESULTS / part).items()
        if not name.startswith("prepared/")
    }
    wrong = {name: found for name in commands if (found := faults(documents.get(name)))}
    for name, document in documents.items():
        if document["command"] != commands.get(name):
            wrong.setdefault(name, []).append("another command")
    listed = to_make()
    assert {name: wrong[name] for name in wrong.keys() - listed} == {}
    assert listed - wrong.keys() == set(), "they have been made"


@pytest.mark.slow
def test_tables_are_those_of_the_documents():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == filled(text), f"{page}: make tables"


def test_the_index_has_every_page_and_part():
    """Its table of parts is held as any: `test_tables_are_those_of_the_documents`."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in RESULTS.glob("*.md")} - {"README.md"}
    linked = re.findall(r"^\| \[([\w./-]+)\]\(\1\) \|", text, re.MULTILINE)
    assert sorted(linked) == sorted(pages | parts().keys())
    assert marked(text) == ["parts"]


def test_every_table_is_shown_and_no_other():
    shown = [name for page in PAGES for name in marked(page.read_text(encoding="utf-8"))]
    made = [f"{name}/{table}" for name, part in parts().items() for table in part.tables]
    assert set(made) <= set(shown)


@pytest.fixture
def in_process(monkeypatch):
    """Cells run in this process: one of their own takes seconds to begin."""
    ran = []

    def run(cell):
        ran.append(cell)
        return output_of([*shlex.split(cell.command)[1:], "--json"])

    monkeypatch.setattr("kvalign.app.commands.eval_run.Cell.output", run)
    return ran


@pytest.mark.slow
def test_a_table_is_rebuilt_from_nothing(in_process, tmp_path):
    override = "--num-tokens 30 --cache-sizes 32,64"
    argv = ["--parts", "llama-mini/python-docs", "--override", override]
    argv += ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "made")]
    assert results.main(argv) == 0
    assert len(in_process) == 1
    table = parts()["llama-mini"].tables["python-docs"]
    head, rule, *lines = markdown(table, tmp_path / "made" / "llama-mini").splitlines()
    assert head == "| method | sinks | C = 32 | C = 64 |" and rule == "|---|---|---|---|"
    names = ["`recompute`", "`window`", "`discard-half`", "`kvalign` (table: nothing)"]
    assert [line.split("|")[1].strip() for line in lines] == names
    document = archive_of(tmp_path / "made" / "llama-mini")["python-docs"]
    first = document["rows"][0]
    assert f"| {first['perplexity']:.2f} |" in lines[0] and first["num_labels"] == 30
    assert str(tmp_path) not in json.dumps(document)
    shown = "<!-- table: llama-mini/python-docs -->\nstale\n<!-- end -->\n"
    assert head in filled(shown, tmp_path / "made") and filled(shown, tmp_path) == shown
    unmade = filled(shown.replace("stale\n", ""), tmp_path)
    assert "Not made yet: `make results PART=llama-mini/python-docs`" in unmade
    assert not lacking(table, tmp_path / "made" / "llama-mini")
    assert results.main(argv) == 0 and len(in_process) == 1  # kept
    losses = tmp_path / "work" / "llama-mini" / "losses"
    assert len(list(losses.iterdir())) == 8


def test_documents_outlast_a_later_command_that_is_refused(monkeypatch, tmp_path):
    def output(cell):
        if cell.name == "distilgpt2-c255":
            raise UserError("refused")
        return "{}"

    def exit_code(parts, work):
        return results.main(["--parts", parts, "--work", str(work), "--results", str(tmp_path)])

    monkeypatch.setattr("kvalign.app.commands.eval_run.Cell.output", output)
    old, new = tmp_path / "old", tmp_path / "new"
    assert exit_code("llama-mini/python-docs,latency/distilgpt2-c255", old) == 2
    assert [path.name for path in old.rglob("*.json")] == ["python-docs.json"]
    assert exit_code("latency/distilgpt2-c255", new) == 2 and not new.exists()


def test_another_text_is_refused(tmp_path):
    (tmp_path / "test.txt").write_text("another")
    with pytest.raises(UserError, match="has SHA-256"):
        check_texts("eval perplexity --corpus text:wikitext-2/test.txt", {"wikitext-2": tmp_path})
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(UserError, match="has no adam-smith"):
        check_texts("train --corpus marked:text:books", {"books": tmp_path})


def test_cards_and_page_name_the_texts():
    page = (ROOT / "docs" / "corpora.md").read_text(encoding="utf-8")
    for name, source in text_sources().items():
        for file, digest in source.files.items():
            assert Path(file).stem in page and digest in page, f"{name}/{file}"
    valid = text_sources()["wikitext-2"].files["valid.txt"]
    cards = sorted((ROOT / "checkpoints").glob("*/README.md"))
    assert len(cards) == len(checkpoints.MODELS) + len(checkpoints.ALIGNERS)
    for card in (card.read_text(encoding="utf-8") for card in cards):
        named = {spec for spec in ("text:wikitext-2/valid.txt", "text:books") if spec in card}
        assert ("text:wikitext-2/valid.txt" in named) == (valid in card)
        assert ("text:books" in named) == ("Standard Ebooks" in card and "Moby Dick" in card)
