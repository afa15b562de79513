"""`kvalign verify`: its table, its exit code, and caches of the user's own."""

import json
import sys

import pytest

from kvalign.app.cli.main import main
from kvalign.invariants import INVARIANTS

FORGETFUL = '''
from transformers import DynamicCache

class Forgetful(DynamicCache):
    """It drops the first entry for the eighth, and gives rows back as they were."""

    def update(self, keys, values, layer_idx, *args, **kwargs):
        found = super().update(keys, values, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if layer.keys.shape[2] > 7:
            layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
        return found

    def reorder_cache(self, beam_idx):
        pass

def make(model):
    return Forgetful()

number = 3
'''
FEW = ["--model", "recall-llama", "--invariants"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder where the command runs, with a module in it."""
    (tmp_path / "forgetful_cache.py").write_text(FORGETFUL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.slow
def test_cache_of_the_users_own(folder, capsys):
    """What failed stands with what to look at, in the table and as JSON."""
    words = ["verify", *FEW, "dense,reorder", "--cache", "forgetful_cache:make"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert INVARIANTS["reorder"].look_at in out
    assert out.splitlines()[-1] == "1 passed, 1 failed"
    assert main([*words, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    states = {one["name"]: one["state"] for one in document["outcomes"]}
    assert not document["holds"]
    assert states == {"dense": "passed", "reorder": "failed"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache", "forgetful_cache:number"], "must be callable with a model, got int"),
        (["--cache-size", "5000"], "--cache-size must be at most 511"),
    ],
)
def test_wrong_use_is_one_line(words, message, folder, capsys):
    model = [] if "--cache-size" in words else ["--model", "recall-llama"]
    assert main(["verify", *model, *words]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert message in err[-1]
