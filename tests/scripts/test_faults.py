"""Every command that writes is under fire, and one of them is killed here."""

import dataclasses
import random

import pytest
from helpers import writing_commands as under_fire

from kvalign.app.cli import catalogue
from scripts import faults


def test_each_command_is_under_fire_or_writes_nothing():
    attacked = [command.words for command in under_fire.COMMANDS]
    for name in catalogue.COMMANDS:
        is_attacked = any(words.startswith(name) for words in attacked) or name == "serve"
        assert is_attacked != (name in under_fire.NOT_HERE), name
        kinds = catalogue.Command(name).all_settings().values()
        if any(
            field.metadata.get("writes") for kind in kinds for field in dataclasses.fields(kind)
        ):
            assert is_attacked or name.startswith("eval ")  # which all write in one way


FICKLE = """
import json, os, time
os.makedirs("out", exist_ok=True)
with open("out/a.json", "w") as file:
    json.dump(time.time(), file)
time.sleep(0.5)
"""


def test_a_finished_file_that_changes_is_lost(tmp_path):
    command = under_fire.Command("fickle", "", ("*.json",), str, python=("-c", FICKLE))
    found = faults.attack(command, 4, tmp_path, random.Random(0))
    assert found["kills"] == 4 and str(tmp_path / "fickle-fire" / "out" / "a.json") in found["lost"]


@pytest.mark.slow
def test_a_command_survives_kills(capsys):
    """One by the clock, one before a write."""
    assert faults.main(["--num-kills", "2", "--commands", "chat"]) == 0
    assert capsys.readouterr().out.endswith("2 kills, 0 corrupt, 0 lost, 0 left over\n")
