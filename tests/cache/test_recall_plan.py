"""What a memory gives back is as it was measured: the nearest plan counts, what is asked for comes
before it, and a saved stream keeps its own.
"""

import json

import pytest
from helpers.methods import tables
from helpers.tiny_models import tiny_model

import kvalign
from kvalign import checkpoints
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_checked
from kvalign.foundation.progress import warn_once
from kvalign.memory import plan
from kvalign.memory.plan import FILE, PLANS, RecallPlan, in_cache
from kvalign.methods import make_method
from kvalign.models.identity import embedding_fingerprint
from kvalign.models.loading import load_model

SIZES = dict(cache_size=32, num_sinks=2, memory=60)


@pytest.fixture
def learned(tmp_path, monkeypatch):
    """A model of learned positions with a name, and no plan anywhere."""
    monkeypatch.setattr(plan, "cache_dir", lambda: tmp_path / "cache")  # that of kernels stays
    monkeypatch.setattr(checkpoints, "FOLDER", tmp_path / "shipped")
    model = tiny_model("gpt2")
    model.config._name_or_path = "models/my-gpt2"
    warn_once.cache_clear()
    return model


def write(model, path, places="age", **fields):
    fields |= dict(recall_places=places, embedding_fingerprint=embedding_fingerprint(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RecallPlan(base_model="my-gpt2", **fields).model_dump_json())


def recall_of(model, aligner, **asked):
    sizes = make_method("kvalign", model, aligner=aligner, **SIZES | asked).sizes
    return sizes.recall_places, sizes.recall_layers


def test_the_nearest_plan_counts(learned, tmp_path, caplog):
    aligner = tables(learned)
    aligner.save_pretrained(tmp_path / "mine")
    aligner.source = str(tmp_path / "mine")
    assert recall_of(learned, aligner) == ("rank", None)
    said = "was not measured on models/my-gpt2: all layers take entries back, by rank"
    assert sum(said in line for line in caplog.messages) == 1
    shipped, cache = (tmp_path / x / PLANS / "my-gpt2.json" for x in ("shipped", "cache"))
    for loudness, path in enumerate((shipped, cache, tmp_path / "mine" / FILE), start=1):
        write(learned, path, recall_layers=f"0:{loudness}")
        assert recall_of(learned, aligner) == ("age", f"0:{loudness}")
    asked = dict(recall_places="rank", recall_layers="all")
    assert recall_of(learned, aligner, **asked) == ("rank", None)


def test_a_plan_of_another_model_does_not_count_and_a_damaged_one_is_named(learned):
    write(tiny_model("gpt2", vocab_size=90), path := in_cache("my-gpt2"))
    assert recall_of(learned, tables(learned))[0] == "rank"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recall_places": "there"}))
    with pytest.raises(UserError, match=r"my-gpt2\.json.*places"):
        recall_of(learned, tables(learned))


@pytest.mark.parametrize(
    "path", sorted((checkpoints.FOLDER / PLANS).glob("*.json")), ids=lambda x: x.stem
)
def test_what_ships_says_whether_it_helps(path):
    one = read_checked(RecallPlan, path)
    usual = one.measured["rows"][1]
    assert one.helps == (usual["by_none_high"] < 1) == (path.stem != "llama-mini")


def test_a_saved_stream_keeps_its_own(tmp_path, monkeypatch):
    """Where nothing was asked for nor measured: by age, in all layers."""
    monkeypatch.setattr(plan, "cache_dir", lambda: tmp_path / "cache")  # that of kernels stays
    model = tiny_model("llama", head_dim=16, vocab_size=8192)
    model.config._name_or_path = "my-llama"
    tokenizer = load_model("llama-mini").tokenizer
    how = dict(method="streaming-llm", max_new_tokens=4, seed=0, **SIZES)
    for asked in ({}, dict(recall_places="rank", recall_layers="1:-1")):
        path = tmp_path / f"{len(asked)}.safetensors"
        stream = kvalign.stream(model, tokenizer, "The island " * 14, **how, **asked)
        "".join(stream)
        stream.save(path)
        write(model, in_cache("my-llama"), "rank", recall_layers="0:2")
        again = kvalign.load_stream(path, model, tokenizer)
        assert again.method.sizes == stream.method.sizes
        in_cache("my-llama").unlink()
        for one in (again, stream):
            one.feed(" and then")
            "".join(one)
        assert again.ids == stream.ids
