"""Each kind of aligner has flags, a trainer and a line in two registries."""

import dataclasses
import json
import shlex

import pytest

from kvalign import checkpoints
from kvalign.aligners import KINDS
from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import find
from kvalign.app.cli.main import main
from kvalign.foundation.settings import settings_of
from kvalign.training.kinds import TRAINERS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data d --objective kl", "--objective is for kvalign train table or table-network, not"),
        ("table --data=d", "--data is for kvalign train network, not table"),
        ("table --patience 3", "--patience is for kvalign train network, not table"),
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
