"""TAB offers every command, flag and name."""

import dataclasses
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvalign import checkpoints
from kvalign.app.cli.catalogue import COMMANDS, Command
from kvalign.app.cli.completion import complete
from kvalign.app.listing import suites
from kvalign.data_gen.corpora import NAMES
from kvalign.foundation.settings import flag
from kvalign.methods.registry import AUTO, METHODS

FIRST = {command.split()[0] for command in COMMANDS}
EVALS = {command.split()[1] for command in COMMANDS if command.startswith("eval ")}
CORPORA = {"".join(name.partition(":")[:2]) for name in NAMES}
# What is typed, and what is offered for its last word.
SHIPPED = {name for name in checkpoints.ALIGNERS if "recall" in name}
LINES = [
    ("kvalign ", FIRST),
    ("kvalign gen", {"generate", "gen-data"}),
    ("kvalign eval ", EVALS),
    ("kvalign train ta", {"table", "table-network"}),
    ("kvalign generate --method ", {AUTO, *METHODS}),
    ("kvalign generate --method=kv", {"kvalign"}),
    ("kvalign generate --aligner kvalign-recall", SHIPPED),
    ("kvalign generate --cache-size ", set()),
    ("kvalign generate --cache-size 64 --stop", {"--stop-at-end", "--stop-strings"}),
    ("kvalign eval perplexity --methods window,", {f"window,{name}" for name in METHODS}),
    ("kvalign eval perplexity --corpus ", CORPORA),
    ("kvalign eval run ", set(suites())),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "my-aligner").mkdir()
    monkeypatch.chdir(tmp_path)


class AnsweredError(Exception):
    pass


def offers(line, monkeypatch):
    """What the shell gets for a line with the cursor at its end."""
    answer = io.StringIO()

    def stop(code):
        raise AnsweredError

    def no_debug_stream(*args):  # argcomplete would take descriptor 9, which may be pytest's
        raise OSError

    monkeypatch.setattr(os, "fdopen", no_debug_stream)
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AnsweredError):
        complete(output_stream=answer, exit_method=stop)
    return {word.strip() for word in answer.getvalue().split("\v") if word}


@pytest.mark.parametrize(("line", "offered"), LINES)
def test_names_are_offered(line, offered, folder, monkeypatch):
    found = offers(line, monkeypatch)
    if "--method=" in line:  # the word with its flag
        found = {word.partition("=")[2] or word for word in found}
    assert found == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_offered(command, monkeypatch):
    one, offered = Command(command), {"--help", "--debug", "--settings"}
    for cls in one.all_settings().values():
        offered |= cls.flags()
        bools = [
            f for f in dataclasses.fields(cls) if "bool" in str(f.type) and f.default is not False
        ]
        offered |= {"--no-" + flag(f.name)[2:] for f in bools}
    offered |= {"--json"} if one.has_json else set()
    assert offers(f"kvalign {command} --", monkeypatch) == offered


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_bash_completes(folder):
    """As at TAB, with `kvalign` started by argcomplete's script."""
    script = [Path(sys.executable).with_name("register-python-argcomplete"), "kvalign"]
    Path("script").write_bytes(subprocess.run(script, capture_output=True, check=True).stdout)
    Path("kvalign").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m kvalign \"$@\"\n")
    Path("kvalign").chmod(0o755)
    ask = (
        "source ./script; COMP_LINE='kvalign doc' COMP_POINT=11 COMP_TYPE=9; "
        '_python_argcomplete kvalign; echo "${COMPREPLY[@]}"'
    )
    env = os.environ | {"PATH": f"{Path.cwd()}:{os.environ['PATH']}"}
    words = ["bash", "--norc", "-c", ask]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["doctor"]
