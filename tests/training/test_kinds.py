"""Each kind of aligner has flags, a trainer and a line in the registry; a new one needs no more."""

import dataclasses
import inspect
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.smaller import INSIDE
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import tiny_model

from kvalign import checkpoints, training
from kvalign.aligners import KINDS, Aligner
from kvalign.app.cli.arguments import parse
from kvalign.app.cli.main import main
from kvalign.app.commands import train
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training import kinds, train_anchored, train_network, train_table

SMALL = "--num-tokens 6000 --chunk-len 48"
NEW_KIND = '''
"""A vector a layer and head, added to each entry that has moved."""

from dataclasses import dataclass

import torch

from kvalign.aligners import Aligner
from kvalign.data_gen.pairs import positionless
from kvalign.foundation.settings import keywords_of, option
from kvalign.training.settings import TextSettings
from kvalign.training.text_run import train_on_text


class OffsetAligner(Aligner):
    kind = "offset"
    recursive = False
    default_sizes = {"num_chunks": 8}

    def __init__(self, config):
        super().__init__(config)
        shape = (config.num_layers, config.num_kv_heads, 1, config.head_dim)
        self.key, self.value = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))

    def realign(self, layer, keys, values, move):
        return keys + self.key[layer], values + self.value[layer]


@dataclass(frozen=True, kw_only=True)
class OffsetSettings(TextSettings):
    """Train offsets on text.

    Example:
        kvalign train --aligner-kind offset --num-chunks 4 --out my-offsets
    """

    num_chunks: int = option(8, help="chunks to take the mean of", at_least=1)


def fit(aligner, settings, loaded, text):
    chunks, half = text.chunks("train", settings.chunk_len), settings.chunk_len // 2
    chunks = chunks[: settings.num_chunks]
    stale, clean = (positionless(loaded.model, ids) for ids in (chunks, chunks[:, half:]))
    for offset, old, new in zip((aligner.key, aligner.value), stale, clean, strict=True):
        offset.copy_((new - old[..., half:, :]).mean((0, 3), keepdim=True)[0])
    return {}


@keywords_of(OffsetSettings)
def train(settings, *, loaded=None):
    """Train offsets."""
    return train_on_text(OffsetAligner, fit, settings, loaded)


SETTINGS = OffsetSettings
'''


@pytest.fixture
def little_work(monkeypatch):
    """Little text in place of Python's documentation, and small steps."""
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def new_kind(tmp_path, monkeypatch):
    """One file and one line more."""
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "offset.py").write_text(NEW_KIND)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path / "kinds")])
    monkeypatch.setitem(KINDS.data, "offset", "kvalign.training.kinds.offset:OffsetAligner")
    yield "offset"
    sys.modules.pop("kvalign.training.kinds.offset", None)


@pytest.mark.slow
def test_a_new_kind_is_a_file_and_a_line(new_kind, tmp_path, capfd, little_work):
    out = str(tmp_path / "aligner")
    assert main(["train", "--aligner-kind", new_kind, "--help"]) == 0
    assert "--num-chunks" in capfd.readouterr().out
    assert main(shlex.split(f"train --aligner-kind offset {SMALL} --out {out} --json")) == 0
    printed = json.loads(capfd.readouterr().out)
    aligner = Aligner.from_pretrained(out)
    assert aligner.config.kind == "offset" and aligner.config.training == printed
    assert aligner.config.sizes == {"num_chunks": 8}
    assert printed["value"]["ratio"] < 1
    assert (
        f"train --aligner-kind offset --out {out}" in (tmp_path / "aligner/README.md").read_text()
    )
    words = f"generate --prompt The --cache-size 40 --max-new-tokens 50 --aligner {out}"
    assert main(shlex.split(words)) == 0
    assert "offset" in train.all_settings()
    assert main(["train", "--out", out, "--data", "d", "--num-chunks", "3"]) == 2
    assert "--num-chunks is for --aligner-kind offset, not network" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data d --objective kl", "--objective is for --aligner-kind table or anchored, not net"),
        ("--data=d --aligner-kind table", "--data is for --aligner-kind network, not table"),
        ("--aligner-kind=table --devices 2", "--devices is for --aligner-kind network, not table"),
        ("--aligner-kind table --no-resume", "--resume is for --aligner-kind network, not table"),
        ("--aligner-kind table --key-hidden1 8", "is for --aligner-kind network or anchored, not"),
        ("--aligner-kind tabel", "unknown aligner kind 'tabel'; did you mean table?"),
        ("--aligner-kind", "expected one argument"),
        ("--aligner-kind table --no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_flags_of_another_kind_are_refused(words, message, capsys):
    assert main(["train", "--out", "a", *words.split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("kind", KINDS)
def test_default_sizes_of_settings_are_those_of_the_kind(kind):
    cls = kinds.trainer_of(kind).SETTINGS
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    sizes = KINDS[kind].default_sizes
    assert sizes.items() <= defaults.items()


@pytest.mark.parametrize("name", checkpoints.ALIGNERS)
def test_recorded_commands_are_accepted(name):
    """Those of earlier versions, too."""
    folder = checkpoints.aligner_path(name)
    for part in json.loads((folder / "config.json").read_text())["training"].values():
        words = shlex.split(part["command"])
        assert words[:2] == ["kvalign", "train"]
        settings, _ = parse(train.settings_for(words[2:]), words[2:], "kvalign train")
        assert settings.aligner_kind in name


def test_settings_and_help_need_no_torch():
    code = (
        "import sys, kvalign.training, kvalign.app.commands.train as train; train.all_settings(); "
        "kvalign.training.train_table.__doc__; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_functions_say_what_they_take():
    for name in training.__all__:
        function = getattr(training, name)
        assert "out" in inspect.signature(function).parameters
        assert "out: " in function.__doc__ and "Raises:" in function.__doc__
    with pytest.raises(ValueError, match="--chunk-len must be at least 8, got 3"):
        train_table(out="a", chunk_len=3)
    with pytest.raises(FileNotFoundError, match="no recorded data in nowhere"):
        train_network(out="a", data="nowhere")


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
