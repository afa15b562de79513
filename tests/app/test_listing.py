"""What is listed is what the registries hold, and what lies in the hub's cache and can be used."""

import json

import pytest
from helpers.hub_cache import put_into_cache
from helpers.tiny_models import tiny_model

from kvalign import checkpoints
from kvalign.app import listing
from kvalign.app.cli.main import main
from kvalign.data_gen import corpora
from kvalign.data_gen.corpus import HUB
from kvalign.methods.registry import AUTO, METHODS
from kvalign.models import fetched
from kvalign.models.architectures import FAMILIES, spec_of
from kvalign.policies import POLICIES

COMMANDS = {f"list {name}": [name] for name in listing.LISTED} | {"list": [*listing.LISTED]}
COMMANDS["models"] = ["models", "fetchable", "architectures"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and nothing that was fetched."""
    monkeypatch.setenv(fetched.MOVED_BY, str(tmp_path / "fetched"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def names(rows):
    return [row["name"] for row in rows]


def test_lists_are_the_registries():
    assert names(listing.models()) == list(checkpoints.MODELS)
    assert {row["architecture"]: row["positions"] for row in listing.architectures()} == FAMILIES
    default, *methods = listing.methods()
    assert default["name"] == AUTO and "the default" in default["about"]
    assert {row["name"]: row["about"] for row in methods} == {
        name: cls.about for name, cls in METHODS.items()
    }
    assert {row["policy"]: row["about"] for row in listing.policies()} == {
        name: cls.about for name, cls in POLICIES.items()
    }
    assert names(listing.aligners()) == list(checkpoints.ALIGNERS)
    assert names(listing.corpora()) == list(corpora.NAMES)
    assert {*HUB, "python-docs"} < {*names(listing.corpora())}


def test_rows_say_what_the_configs_say():
    for row in listing.aligners():
        config = json.loads((checkpoints.FOLDER / row["name"] / "config.json").read_text())
        assert row["where"] == "shipped"
        assert (row["base_model"], row["kind"]) == (config["base_model"], config["kind"])
        assert row["max_cache_size"] == config["chunk_len"] - 1
        for part in config["training"].values():
            assert all(name in row["trained_on"][0] for name in part["data"]["corpus"])
    labels = {row["name"]: row["label"] for row in listing.aligners()}
    assert labels["kvalign-gpt2-mini-table-kl"] == "table-kl"
    realigns = {row["name"]: row["realigns"] for row in listing.aligners()}
    assert realigns["kvalign-llama-mini-table"] == []
    gpt2, llama, context, *others = listing.models()
    assert context["purpose"] == "writes text" and context["positions"] == "learned"
    assert {row["purpose"] for row in others} == {"for kvalign eval recall; writes no text"}
    assert (gpt2["positions"], llama["positions"]) == ("learned", "rotary")
    assert gpt2["context_len"] == 512 and llama["num_kv_heads"] == 2
    assert gpt2["default_aligner"] == "kvalign-gpt2-mini-table-network"


def test_models_of_the_cache_are_listed_if_they_can_be_streamed(cache, tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "own")
    put_into_cache(cache, "some/qwen3", tmp_path / "own")
    put_into_cache(cache, "some/data", tmp_path / "own", "dataset")
    (put_into_cache(cache, "some/no-weights", tmp_path / "own") / "model.safetensors").unlink()
    other = put_into_cache(cache, "some/bert", tmp_path / "own") / "config.json"
    other.write_text(other.read_text().replace("qwen3", "bert"))
    assert names(listing.models()) == [*checkpoints.MODELS, "some/qwen3"]
    row, spec = listing.models()[-1], spec_of(model.config)
    assert row["where"] == "cached" and row["architecture"] == "qwen3"
    for name in ("context_len", "num_layers", "num_kv_heads", "head_dim"):
        assert row[name] == getattr(spec, name)


def test_aligners_of_the_cache_are_shown_without_control_characters(cache, capsys):
    own = put_into_cache(cache, "some/aligner", checkpoints.FOLDER / checkpoints.ALIGNERS[0])
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"base_model": "a\x1b[31mb\n\u202ec"}))
    assert main(["list", "aligners"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("some/aligner") and "a␛[31mb [U+202E]c" in last


@pytest.mark.parametrize(("command", "tables"), COMMANDS.items())
def test_text_is_a_line_each_and_json_one_document(command, tables, capsys):
    assert main([*command.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == tables
    assert main(command.split()) == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    for rows, block in zip(document.values(), blocks, strict=True):
        heading, rule, *lines = block.splitlines()
        assert heading.split()[0] == next(iter(rows[0])) and set(rule) == {"─"}
        assert [line.split()[0] for line in lines] == [next(iter(row.values())) for row in rows]
