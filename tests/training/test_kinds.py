"""Each kind of aligner has flags, a trainer and a line in two registries."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import tiny_model

from kvalign import checkpoints
from kvalign.aligners import KINDS, Aligner
from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import find
from kvalign.app.cli.main import main
from kvalign.foundation.settings import settings_of
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training import train_anchored
from kvalign.training.kinds import TRAINERS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data d --objective kl", "--objective is for kvalign train table or table-network or"),
        ("--data=d --aligner-kind table", "--data is for kvalign train network, not table"),
        ("table --no-resume", "--resume is for kvalign train network, not table"),
    ],
)
def test_flags_of_another_kind_are_refused(words, message, capsys):
    assert main(["train", *words.split(), "--out", "a"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("kind", KINDS)
def test_default_sizes_of_settings_are_those_of_the_kind(kind):
    fields = dataclasses.fields(settings_of(TRAINERS[kind]))
    defaults = {field.name: field.default for field in fields}
    sizes = KINDS[kind].default_sizes
    assert sizes.items() <= defaults.items()


@pytest.mark.parametrize("name", checkpoints.ALIGNERS)
def test_recorded_commands_are_accepted(name):
    """Those of earlier versions, too."""
    folder = checkpoints.aligner_path(name)
    for part in json.loads((folder / "config.json").read_text())["training"].values():
        words = shlex.split(part["command"])
        assert words[:2] == ["kvalign", "train"]
        command, flags = find(words[1:])
        settings, _ = parse(command.settings, flags, "kvalign train")
        assert settings.aligner_kind in name


@pytest.mark.slow
def test_a_model_in_memory_is_trained_on(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    model = tiny_model("gpt2")
    loaded = LoadedModel(model, byte_tokenizer(64, TEXT), spec_of(model.config, "tiny"))
    options = dict(corpus=f"text:{text}", num_tokens=2000, chunk_len=32, key_hidden1=8, max_steps=2)
    weights = []
    for out in (tmp_path / "one", tmp_path / "two"):
        torch.rand(1)  # the seed decides, not what was drawn before
        results = train_anchored(out=out, target="key", loaded=loaded, **options)
        weights.append(Aligner.from_pretrained(out).state_dict())
    assert list(results) == ["key"] and "--model tiny" in results["key"]["command"]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert Aligner.from_pretrained(Path(out)).config.base_model == "tiny"
