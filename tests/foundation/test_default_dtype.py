"""Processes whose default dtype is not float32: what is computed does not depend on it."""

import ast

import pytest
import torch
from helpers.doc_pages import ROOT
from helpers.methods import anchored, network, step, tables
from helpers.tiny_models import CONTEXT_LEN

import kvalign
from kvalign.aligners import TableAligner, new_config
from kvalign.models.architectures import spec_of
from kvalign.training.kinds.table import TableSettings
from kvalign.training.table_objectives import tune
from kvalign.training.table_run import standardise
from kvalign.training.text import Text
from kvalign.training.text_run import measure

MAKERS = {"zeros", "ones", "empty", "rand", "randn", "linspace", "eye"}
WAYS = {
    "table": {},
    "int8": dict(cache_dtype="int8"),
    "memory": dict(memory=30),
    "h2o": dict(policy="h2o"),
    "random": dict(policy="random"),
    "second-chance": dict(policy="second-chance"),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def other_default(request):
    """A way to change the default dtype of this process, which is float32 again afterwards."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("kind", "way"), [*(("gpt2", way) for way in WAYS), ("llama", "table")])
def test_streams_and_losses(kind, way, models, ids, other_default):
    model = models[kind]

    def found():
        method = kvalign.make_method(
            "kvalign", model, cache_size=20, aligner=tables(model, 0.3), **WAYS[way]
        )
        return step(method, ids[:1, :60], 30), kvalign.score(method, ids[:1, :60])

    expected = found()
    other_default()
    assert all(map(torch.equal, found(), expected))


@pytest.mark.slow
@pytest.mark.parametrize("make", [network, anchored])
def test_networks(make, models, ids, other_default):
    model = models["gpt2"]

    def found():
        torch.manual_seed(0)
        method = kvalign.make_method("kvalign", model, cache_size=20, aligner=make(model))
        return step(method, ids[:, :60], 30), method.places_by.aligner.state_dict()

    expected, weights = found()
    other_default()
    logits, others = found()
    assert torch.equal(logits, expected)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
def test_training(models, ids, other_default):
    """A table: its moments, two steps through the model, and what is measured of it."""
    model = models["gpt2"]
    text = Text([ids[0].repeat(20)], [ids[0].repeat(5)])

    def found():
        fields = dict(chunk_len=CONTEXT_LEN, num_sinks=0, shifts=(1,))
        config = new_config("table", model, spec_of(model.config, "tiny"), **fields)
        aligner = TableAligner(config).requires_grad_(False)
        standardise(aligner, model, text.chunks("train", CONTEXT_LEN), ("key", "value"))
        losses = tune(
            aligner, model, text, TableSettings(out="unused", objective="kl", max_steps=2)
        )
        return losses, measure(aligner, model, text.chunks("val", CONTEXT_LEN)), aligner.key

    expected = found()
    other_default()
    again = found()
    assert again[:2] == expected[:2] and torch.equal(again[2], expected[2])


def test_a_model_that_ships(other_default):
    def text():
        loaded = kvalign.load_model("gpt2-mini")
        assert loaded.model.dtype == torch.float32
        sizes = dict(cache_size=16, max_new_tokens=40, seed=0)
        return "".join(kvalign.stream(loaded.model, loaded.tokenizer, "The island", **sizes))

    expected = text()
    other_default()
    assert text() == expected


def test_float_tensors_of_the_code_have_a_dtype():
    """In a call of torch that makes floats by default."""
    missing = []
    for part in ("kvalign", "eval", "training", "data_gen", "checkpoints"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                names = {keyword.arg for keyword in node.keywords}
                is_empty = all(getattr(x, "value", None) == 0 for x in node.args)
                if is_torch and node.func.attr in MAKERS and not is_empty and "dtype" not in names:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not missing
