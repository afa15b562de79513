"""Folders of models and chat templates that came from somewhere: refused in one line, and nothing
else is said.
"""

import json

import pytest
from helpers.hostile_weights import claims, one
from helpers.refusals import altered_model, refuses

from kvalign import checkpoints, load_model
from kvalign.streaming.turns import Talk

WTE = "transformer.wte.weight"
WEIGHTS = {
    "one missing": lambda t: {name: x for name, x in t.items() if name != WTE},
    "a row less": one(WTE, lambda x: x[:-1].contiguous()),
    "claims terabytes": claims([10**6, 10**6], name=WTE),
}


def loads_not(folder, capfd, message="cannot load a model from folder"):
    """Refused in one line, with nothing else on stdout or stderr but the bar of a slow load."""
    capfd.readouterr()
    refuses(lambda: load_model(str(folder)), message)
    captured = capfd.readouterr()
    lines = [x for x in captured.err.splitlines() if not x.startswith("kvalign: loading ")]
    assert captured.out == "" and lines == []


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(weights, tmp_path, capfd):
    loads_not(altered_model(tmp_path / "m", weights=weights), capfd)


PANIC = {"type": "Precompiled", "precompiled_charsmap": "!!"}


def test_a_tokenizer_that_panics_is_no_fault_of_ours(tmp_path):
    """Which is no Exception of Python's; tokenizers, of Rust, says so in lines of its own."""
    values = json.loads((checkpoints.model_path("recall-gpt2") / "tokenizer.json").read_text())
    text = json.dumps(values | {"normalizer": PANIC})
    folder = altered_model(tmp_path / "m", files={"tokenizer.json": text})
    refuses(lambda: load_model(str(folder)), "cannot load a model from folder")


TEMPLATES_THAT_SERVE = [
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{% for m in messages %}{{ m.content }}{% continue %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("recall-gpt2").tokenizer


@pytest.mark.parametrize("template", TEMPLATES_THAT_SERVE)
def test_templates_of_many_kinds_serve(template, tokenizer):
    tokenizer.chat_template = template
    assert Talk(tokenizer).turn_ids("Hi", True)


LATER = {
    "leaves answers out": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "only the last": "{{ messages[-1].content }}",
}


@pytest.mark.parametrize("template", LATER.values(), ids=LATER)
def test_templates_that_take_one_turn_alone(template, tokenizer):
    tokenizer.chat_template = template
    Talk(tokenizer).turn_ids("Hi", True)
    refuses(lambda: Talk(tokenizer).turn_ids("Why?", False), "the chat template of this model")
