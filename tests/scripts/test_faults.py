"""Every command that writes is under fire, and two of them are killed here."""

import pytest
from helpers import writing_commands as under_fire

from kvalign.app import catalogue
from kvalign.settings import fields_of
from scripts import faults


def test_each_command_is_under_fire_or_writes_nothing():
    attacked = [command.words for command in under_fire.COMMANDS]
    for name in catalogue.COMMANDS:
        is_attacked = any(words.startswith(name) for words in attacked) or name == "serve"
        assert is_attacked != (name in under_fire.NOT_HERE), name
        kinds = catalogue.Command(name).all_settings().values()
        if any(field.metadata.get("writes") for kind in kinds for field in fields_of(kind)):
            assert is_attacked or name == "eval latency"


def test_shares_add_up():
    assert faults.shares(10, [1, 0.5, 1, 0.5]) == [3, 2, 3, 2]
    assert sum(faults.shares(100, [1, 0.5, 0.7, 1, 1, 1, 0.3])) == 100


@pytest.mark.slow
def test_commands_survive_kills(capsys):
    assert faults.main(["--num-kills", "3", "--commands", "lanes,chat"]) == 0
    assert capsys.readouterr().out.endswith("3 kills, 0 corrupt, 0 lost, 0 left over\n")
