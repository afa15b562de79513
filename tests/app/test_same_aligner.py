"""Commands and Python functions find the same aligner, and so do saved streams and evaluations."""

from pathlib import Path

import pytest
from helpers.methods import tables

import kvalign
from kvalign import make_method
from kvalign.app.commands.generate import GenerateSettings
from kvalign.app.commands.verify import VerifySettings
from kvalign.eval.evaluations.perplexity import PerplexitySettings
from kvalign.eval.protocol.grid import make_grid

TRAINED = Path("kvalign-data/gpt2-mini/table")
SHIPPED = "kvalign-gpt2-mini-table-network"
JUDGED = {"used": True, "judged": {"parts": ["key"]}}


@pytest.mark.parametrize(
    ("method", "about", "expected"),  # about: what training says of an aligner of this folder
    [
        ("kvalign", None, SHIPPED),
        ("kvalign", {"used": False}, SHIPPED),
        ("kvalign", {"used": True}, str(TRAINED)),
        ("kvalign", JUDGED, str(TRAINED)),
        ("auto", JUDGED, SHIPPED),
    ],
)
def test_python_and_commands_find_the_same(method, about, expected, loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if about is not None:
        aligner = tables(loaded.model, scale=0.3)
        aligner.config.training["key"] = about
        TRAINED.mkdir(parents=True)
        (TRAINED / "README.md").touch()  # a card would need all figures
        aligner.save_pretrained(TRAINED)
    settings = dict(model="gpt2-mini", method=method, cache_size=16)
    sampling = dict(max_new_tokens=2, seed=0)
    python = make_method(method, loaded.model, cache_size=16)
    command = GenerateSettings(**settings, **sampling, num_sinks=0).stream(loaded, "The island")
    verify = VerifySettings(**settings).make()(loaded.model)
    assert [x.aligner.source for x in (python, command.method, verify)] == 3 * [expected]

    list(command)
    command.save("saved")
    again = kvalign.load_stream("saved", loaded.model, loaded.tokenizer)
    assert again.method.aligner.source == expected

    of_evaluation = PerplexitySettings(model="gpt2-mini", methods=("kvalign",), cache_sizes=(16,))
    (method,) = make_grid(of_evaluation, loaded.model)
    assert method.aligner.source == SHIPPED, "an evaluation compares what all can have"
