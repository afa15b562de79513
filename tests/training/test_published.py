"""The authors' networks: what is imported computes what they publish, and what is not theirs is
refused.
"""

import json
import shlex
from pathlib import Path

import pytest
import torch
from helpers.published_files import random_network, save_model, write_networks

from kvalign.aligners import Aligner, Move, NetworkAligner
from kvalign.aligners.entries import KV
from kvalign.app.cli.main import main
from kvalign.cache.realigner import Recursive
from kvalign.methods import make_method
from kvalign.models.architectures import rotation_of
from kvalign.models.loading import load_model
from kvalign.training.settings import ImportPublishedSettings

CHUNK_LEN = 40


def published(state: dict, x, layer: int):
    """The authors' formula, row by row, for entries x [B, H, S, D] at positions 0, 1, ..."""
    rows = []
    for head in range(x.shape[1]):
        for place in range(x.shape[2]):
            tables = (state["emb_pos.weight"][place], state["emb_blocks.weight"][layer])
            tables += (state["emb_heads.weight"][head],)
            wide = torch.cat([x[0, head, place], *tables])
            hidden = torch.relu(state["fc1.weight"] @ wide + state["fc1.bias"])
            hidden = torch.relu(state["fc2.weight"] @ hidden + state["fc2.bias"])
            rows.append(state["fc3.weight"] @ hidden + state["fc3.bias"] + x[0, head, place])
    return torch.stack(rows).view_as(x)


def check_equals_formula(aligner, model, paths, num_slots):
    """Through the cache's realigner: what it gets are keys at their old positions, if rotated."""
    config, rng = aligner.config, torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, 1, config.num_kv_heads, num_slots, config.head_dim, generator=rng)
    states = [torch.load(path, weights_only=True, map_location="cpu") for path in paths]
    move = Move(1, first=4, now=torch.arange(4, 4 + num_slots))
    for layer in range(0, config.num_layers, max(1, config.num_layers // 3)):
        found = Recursive(rotation_of(model), aligner).place(layer, KV(keys, values), move)
        for x, state, moved in zip((keys, values), states, found, strict=True):
            expected = published(state["model_state_dict"], x, layer)
            assert (moved - expected).abs().max() <= 1e-6 * max(1, expected.abs().max())
            assert (moved - x).abs().max() > 1e-3


@pytest.fixture
def workplace(tmp_path, monkeypatch, offline):
    """A folder with a tiny GPT-2 in `gpt2` and files of networks for it."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "gpt2", "gpt2")
    write_networks(tmp_path)
    return tmp_path


def command(**changes) -> list[str]:
    flags = dict(keys="keys.pth", values="values.pth", model="gpt2", out="out")
    flags |= {"chunk-len": str(CHUNK_LEN)} | changes
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return ["import-published", *words]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_imported_is_published(kind, workplace):
    save_model(workplace / "llama", "llama", head_dim=16)
    assert main(command(model=kind)) == 0
    aligner = Aligner.from_pretrained(workplace / "out")
    assert isinstance(aligner, NetworkAligner) and aligner.config.shifts == (1,)
    assert aligner.config.num_positions == CHUNK_LEN - 5 == len(aligner.key.position.weight)
    loaded = load_model(kind)
    paths = [workplace / "keys.pth", workplace / "values.pth"]
    check_equals_formula(aligner, loaded.model, paths, aligner.config.num_positions)
    method = make_method("kvalign", loaded.model, cache_size=20, aligner=aligner)
    assert torch.isfinite(method.feed(torch.arange(2, 90)[None])).all()


def test_example_runs_and_the_card_names_the_authors(workplace, capsys):
    example = ImportPublishedSettings.__doc__.partition("Example:")[2].strip()
    folder = workplace / "distilbert" / "distilgpt2"
    save_model(folder, "gpt2", n_positions=256)
    state = random_network(24, 12)
    state["model_state_dict"]["emb_pos.weight"] = torch.randn(256, 32)
    for kv in ("keys", "values"):
        torch.save(state, workplace / f"{kv}_network_distilgpt2.pth")
    assert main(shlex.split(example)[1:]) == 0
    assert "the authors' networks for distilbert/distilgpt2" in capsys.readouterr().out
    card = (workplace / "published" / "README.md").read_text()
    assert card.count("published by the authors of KV-Align (github.com/eecs585projectorg") == 2
    assert "keys_network_distilgpt2.pth, sha256" in card and example.replace("\n", " ") in card
    assert "license: other" in card and "Apache-2.0 for this aligner" not in card


def test_nothing_is_overwritten_unasked(workplace, capsys):
    assert main(command()) == 0
    assert main(command()) == 2
    assert "out already holds an aligner: give --overwrite" in capsys.readouterr().err
    weights = workplace / "out" / "model.safetensors"
    before = weights.read_bytes()
    assert main([*command(values="keys.pth"), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["value_hidden1"] == 24
    assert weights.read_bytes() != before


def changed(name, change):
    return lambda state: state.update({name: change(state[name])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("fc2.bias"), "holds no KV-Align network: missing fc2.bias"),
        (changed("fc3.bias", lambda x: x[1:]), "fc3.bias is (15,), needed (16,)"),
        (changed("emb_pos.weight", lambda x: x[:34]), "has 34 positions, needed 35 for"),
    ],
)
def test_other_networks_are_refused(damage, message, workplace, capsys):
    saved = random_network(10, 20)
    damage(saved["model_state_dict"])
    torch.save(saved, "values.pth")
    check_refused(command(), "values.pth", message, capsys)


def check_refused(argv, name, message, capsys):
    capsys.readouterr()
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert name in captured.err and message in captured.err and not captured.out
    assert len(captured.err.strip().splitlines()) == 1 and len(captured.err) < 400
    assert not Path("out").exists()


class Surprise:
    def __reduce__(self):
        return (open, ("executed", "w"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Surprise(), "is damaged or has more than tensors"),
        ({"model_state_dict": 3}, "has no model_state_dict"),
    ],
)
def test_other_pickles_are_refused(content, message, workplace, capsys):
    torch.save(content, "keys.pth")
    check_refused(command(), "keys.pth", message, capsys)
    assert not (workplace / "executed").exists()
