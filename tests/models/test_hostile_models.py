"""Folders of models and chat templates that came from somewhere: refused in one line, and nothing
else is said.
"""

import json
import os

import pytest
import torch
from helpers.hostile_weights import claims, one, raw
from helpers.refusals import altered_model, refused, refuses

from kvalign import checkpoints, load_model
from kvalign.app.cli.main import main
from kvalign.streaming.turns import opening_len, turn_ids

HUGE = 10**12
TOKENIZER = "tokenizer_config.json"
LLAMA = "recall-llama"
AUTO_MAP = {"auto_map": {"AutoModelForCausalLM": "theirs.Model", "AutoConfig": "theirs.Config"}}
WTE = "transformer.wte.weight"
FP8 = {"quant_method": "fp8"}
CONFIGS = {
    "layers a text": {"n_layer": "six"},
    "layers huge": {"n_layer": HUGE},
    "type unknown": {"model_type": "gpt5"},
    "type another's": {"model_type": "llama"},
    "type code of theirs": AUTO_MAP | {"model_type": "theirs"},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantized, and its weights are not": {"quantization_config": FP8},
    "quantized and huge": {"n_layer": 1000, "n_embd": 2**16, "quantization_config": FP8},
}
LLAMAS = {
    "kv heads none": {"num_key_value_heads": 0},
    "head dim odd": {"head_dim": 63},
    "rope a text": {"rope_parameters": "none"},
    "rope unknown": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    "theta 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
}
FILES = {
    "config empty": {"config.json": ""},
    "config nested": {"config.json": "[" * 10**5},
    "config bytes": {"config.json": "\ud800"},
    "config left out": {"config.json": None},
    "tokenizer left out": {"tokenizer.json": None, "tokenizer_config.json": None},
    "tokenizer empty": {"tokenizer.json": ""},
    "tokenizer a list of settings": {"tokenizer_config.json": "[]"},
    "generation a list": {"generation_config.json": "[]"},
}
WEIGHTS = {
    "empty": raw(b""),
    "one missing": lambda t: {name: x for name, x in t.items() if name != WTE},
    "all missing": lambda t: {},
    "other names": lambda t: {f"their.{name}": x for name, x in t.items()},
    "a row less": one(WTE, lambda x: x[:-1].contiguous()),
    "integers": lambda t: {name: x.to(torch.int32) for name, x in t.items()},
    "claims terabytes": claims([10**6, 10**6], name=WTE),
}


def loads_not(folder, capfd, message="cannot load a model from folder"):
    """Refused in one line, with nothing else on stdout or stderr but the bar of a slow load."""
    capfd.readouterr()
    refuses(lambda: load_model(str(folder)), message)
    captured = capfd.readouterr()
    lines = [x for x in captured.err.splitlines() if not x.startswith("kvalign: loading ")]
    assert captured.out == "" and lines == []


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configs(config, tmp_path, capfd):
    loads_not(altered_model(tmp_path / "m", config=config), capfd, "")


@pytest.mark.slow
@pytest.mark.parametrize("config", LLAMAS.values(), ids=LLAMAS)
def test_configs_of_rotary_models(config, tmp_path, capfd):
    loads_not(altered_model(tmp_path / "m", LLAMA, config=config), capfd, "")


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_files(files, tmp_path, capfd):
    loads_not(altered_model(tmp_path / "m", files=files), capfd, "/m")


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(weights, tmp_path, capfd):
    loads_not(altered_model(tmp_path / "m", weights=weights), capfd)


PANIC = {"type": "Precompiled", "precompiled_charsmap": "!!"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "value"),
    [("model", {}), ("added_tokens", 3)],
)
def test_tokenizers(part, value, tmp_path, capfd):
    values = json.loads((checkpoints.model_path("recall-gpt2") / "tokenizer.json").read_text())
    text = json.dumps(values | {part: value})
    loads_not(altered_model(tmp_path / "m", files={"tokenizer.json": text}), capfd)


def test_a_tokenizer_that_panics_is_no_fault_of_ours(tmp_path):
    """Which is no Exception of Python's; tokenizers, of Rust, says so in lines of its own."""
    values = json.loads((checkpoints.model_path("recall-gpt2") / "tokenizer.json").read_text())
    text = json.dumps(values | {"normalizer": PANIC})
    folder = altered_model(tmp_path / "m", files={"tokenizer.json": text})
    refuses(lambda: load_model(str(folder)), "cannot load a model from folder")


@pytest.mark.parametrize("end", [[1, "x"], {"a": 1}, 1.5, True, "2", [10**30], [[1]], float("nan")])
def test_end_tokens(end, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    altered_model(
        tmp_path / "m", files={"generation_config.json": json.dumps({"eos_token_id": end})}
    )
    argv = ["generate", "--model", "m", "--prompt", "k1=3", "--method", "window", "--stop-at-end"]
    assert main(argv) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("error:") == 1
    assert "an error in KV-Align" not in captured.err


# These do no harm, and fail or say nothing in this process too.
BROKEN_TEMPLATES = {
    "divides by zero": "{{ 1 / 0 }}",
    "syntax": "{% for m in messages %}{{ m.content }}",
    "refuses": "{{ raise_exception('alternate, please') }}",
    "a class": "{{ ''.__class__.__mro__ }}",
    "a surrogate": "{{ '\\ud800' }}",
    "nothing": "{{ '' }}",
}
TEMPLATES = {
    "memory": "{{ ('x' * 10**6) * (10**9 * messages | length) }}",
    "a constant of years": "{{ 9**(9**9) }}",
    "a constant of gigabytes": "{{ 'x' * 10**9 }}",
    "an indent": "{{ messages | tojson(indent=10**9) }}",
    "doubles": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "squares": "{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}{{ n.x }}",
    "long": "{{ 'ab' * 600000 }}",
    "brackets": "{{" + "(" * 3000 + ")" * 3000 + "}}",
}


END_AT_THE_CLOCK = ("squares",)  # 3 s; "a constant of years" too

TEMPLATES_THAT_SERVE = [
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{% for m in messages %}{{ m.content }}{% continue %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("recall-gpt2").tokenizer


@pytest.fixture
def not_tried(monkeypatch):
    """No process tries a template out, and what it says for itself is seen alone."""
    monkeypatch.setattr("kvalign.streaming.turns.fault_of", lambda *args: "")


@pytest.mark.slow
@pytest.mark.parametrize("template", BROKEN_TEMPLATES.values(), ids=BROKEN_TEMPLATES)
def test_broken_templates(template, tokenizer, not_tried, capfd):
    tokenizer.chat_template = template
    refuses(lambda: turn_ids(tokenizer, "Hi", True), "the chat template of this model")
    refuses(lambda: opening_len(tokenizer, "Be brief."), "the chat template of this model")
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(x, id=name, marks=pytest.mark.slow if name in END_AT_THE_CLOCK else ())
        for name, x in TEMPLATES.items()
    ],
)
def test_templates(template, tokenizer, capfd):
    tokenizer.chat_template = template
    refuses(lambda: turn_ids(tokenizer, "Hi", True), "the chat template of this model")
    refuses(lambda: opening_len(tokenizer, "Be brief."), "the chat template of this model")
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "tool_use"])
def test_templates_by_name(name, tokenizer):
    tokenizer.chat_template = {"default": "{{ messages[0].content }}"} | {name: "{{ 9**(9**9) }}"}
    refuses(lambda: turn_ids(tokenizer, "Hi", True), "cannot be used: it needs over")


@pytest.mark.parametrize("template", TEMPLATES_THAT_SERVE)
def test_templates_that_are_tried_and_serve(template, tokenizer):
    tokenizer.chat_template = template
    assert turn_ids(tokenizer, "Hi", True)


LATER = {
    "leaves answers out": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "only the last": "{{ messages[-1].content }}",
    "only the first": "{{ messages[0].content }}",
}


@pytest.mark.parametrize("template", LATER.values(), ids=LATER)
def test_templates_that_take_one_turn_alone(template, tokenizer, not_tried):
    tokenizer.chat_template = template
    turn_ids(tokenizer, "Hi", True)
    refuses(lambda: turn_ids(tokenizer, "Why?", False), "the chat template of this model")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["generation_config.json", "chat_template.jinja", TOKENIZER, "tokenizer.json"]
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_in_a_model_s_folder_is_not_left_out(name, make, tmp_path, monkeypatch, capfd):
    """What it would say, of sampling or of turns, is part of the model."""
    monkeypatch.chdir(tmp_path)
    altered_model(tmp_path / "m", files={})
    (tmp_path / "m" / name).unlink(missing_ok=True)
    make(tmp_path / "m" / name)
    refused(["chat", "--model", "m", "--say", "Hi"], f"{name} is not a file", capfd)
