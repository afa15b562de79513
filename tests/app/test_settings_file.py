"""`--settings FILE`: a run's configuration is read from YAML, or from a result's JSON."""

import json

import pytest
from helpers.results_example import write_folder

from kvalign.app.cli.arguments import parse
from kvalign.app.cli.main import main
from kvalign.app.commands.generate import GenerateSettings
from kvalign.foundation.errors import UserError


def read(path, *flags):
    return parse(GenerateSettings, ["--settings", str(path), *flags], "kvalign generate")[0]


def test_flags_replace_what_a_file_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("cache-size: 32\nmax_new_tokens: 20\nstop_strings: a\nmethod: null\n")
    settings = read(path, "--cache-size", "16")
    assert (settings.cache_size, settings.max_new_tokens) == (16, 20)
    assert settings.stop_strings == "a" and settings.method == GenerateSettings().method
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"settings": settings.as_dict() | {"out": "lost.json"}}))
    assert read(result) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moons: 3", "has settings that kvalign generate has not: moons"),
        ("[1, 2]", r"must have settings, name: value, got \[1, 2\]"),
        ("a: [", "is not YAML"),
        ("cache-size: many", "--cache-size must be a whole number, got 'many'"),
    ],
)
def test_a_file_of_others_is_refused_in_a_line(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "run.yaml")


def test_what_is_required_may_stand_in_the_file(tmp_path, capsys):
    folder = write_folder(tmp_path / "results")
    (tmp_path / "run.yaml").write_text(f"folder: {folder}\ntables: latex\n")
    assert main(["report", "--settings", str(tmp_path / "run.yaml")]) == 0
    assert r"\begin{tabular}" in capsys.readouterr().out
    assert main(["report"]) == 2
    assert "required: FOLDER" in capsys.readouterr().err
    assert main(["report", str(folder), "--tables", "markdown"]) == 0
    _, head, rule, *lines = (x for x in capsys.readouterr().out.splitlines() if x)
    titles = [line for line in lines if line.startswith("**")]
    assert len(set(titles)) == len(titles) and any("Recall slices: " in one for one in titles)
    assert head.startswith("| method |") and rule.startswith("| --- |")
