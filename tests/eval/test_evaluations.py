"""What holds for every evaluation: its document is read by the report, its function takes keywords,
and a new one is a file and a line.
"""

import json
import os
import subprocess

import pandas as pd
import pytest
from helpers.results_example import documents

import kvalign.eval
from kvalign.app.cli.catalogue import COMMANDS
from kvalign.app.cli.main import main
from kvalign.eval.evaluations import ABOUT, EVALUATIONS
from kvalign.eval.protocol import document
from kvalign.eval.report import Results, read
from kvalign.eval.report.contents import sections


@pytest.mark.parametrize("name", EVALUATIONS)
def test_each_has_what_the_report_shows(name):
    assert ABOUT[name] == COMMANDS[f"eval {name}"]
    results = Results({name: documents()[name]})
    (section, *_) = sections(results)
    assert name in section.names and all(len(table.columns) > 1 for table in section.tables)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_documents_are_read_as_they_are_and_older_ones_too(name, tmp_path):
    """Earlier versions wrote whether `--json` was given; figures keep their types."""
    document = documents()[name]
    document["settings"]["json"] = True
    (tmp_path / "x.json").write_text(json.dumps(document))
    seen = read(tmp_path).documents["x"]
    assert json.loads(json.dumps(seen["rows"])) == document["rows"]
    assert seen["settings"] == document["settings"]


def test_functions_take_keywords_and_a_loaded_model(loaded):
    keywords = dict(methods="window", cache_sizes=16, num_tokens=8, loaded=loaded)
    document = kvalign.eval.perplexity(**keywords)
    assert document["rows"][0]["num_labels"] == 8
    assert document["settings"]["model"] == loaded.spec.name
    with pytest.raises(TypeError, match="num_labels"):
        kvalign.eval.perplexity(num_labels=8)
    assert set(EVALUATIONS) < set(dir(kvalign.eval))
    for name in EVALUATIONS:
        assert "cache_sizes:" in getattr(kvalign.eval, name).__doc__


def test_results_go_where_two_flags_say(tmp_path, capsys):
    """The document that --json prints, and its rows; one is read by the report, both by pandas."""
    argv = ["eval", "perplexity", "--methods", "window", "--cache-sizes", "8,16"]
    argv += ["--num-tokens", "9", "--out", str(tmp_path / "x.json")]
    assert main([*argv, "--csv", str(tmp_path / "x.csv"), "--json"]) == 0
    document = json.loads((tmp_path / "x.json").read_text())
    assert document == json.loads(capsys.readouterr().out)
    assert read(tmp_path).documents["x"]["rows"] == document["rows"]
    rows, table = pd.DataFrame(document["rows"]), pd.read_csv(tmp_path / "x.csv")
    assert table["perplexity"].tolist() == rows["perplexity"].tolist()
    assert {*table.columns} == {name for name in rows if not isinstance(rows[name][0], list | dict)}
    of_texts = kvalign.eval.readability(text=str(tmp_path / "x.csv"), out=tmp_path / "y.json")
    assert json.loads((tmp_path / "y.json").read_text())["rows"] == json.loads(
        json.dumps(of_texts["rows"])
    )


def test_the_commit_is_read_without_a_trace(tmp_path, monkeypatch):
    """git's index is the user's: another program, or a full disk, may be in the way of its lock."""
    (tmp_path / "kvalign").mkdir()
    source = tmp_path / "kvalign" / "__init__.py"
    source.write_text("")
    by = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "."], [*by, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    monkeypatch.setattr("kvalign.__file__", str(source))
    index = tmp_path / ".git" / "index"
    os.utime(source, (0, 0))  # which is why git would write anew what it knows of it
    before = index.read_bytes()
    clean = document._commit()
    assert clean and not clean.endswith("-dirty")
    assert index.read_bytes() == before
    source.write_text("changed")
    assert document._commit() == f"{clean}-dirty"
