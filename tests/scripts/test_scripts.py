"""Scripts that stand alone: on a GPU (here the CPU), under fire, the core's size."""

import dataclasses
import importlib.util
import random

import pytest
from helpers import writing_commands as under_fire

from kvalign.app.cli import catalogue
from scripts import faults, gpu
from scripts.core_size import APART, calls_of_step, lines_of_core


@pytest.mark.parametrize(
    "begin",
    ["weights of int8", "float32, tables", "bfloat16, window", "segments, window", "float32, 1 r"],
)
def test_the_cpu_gives_what_the_cpu_gives(begin, monkeypatch, capsys):
    found = next(one for one in gpu.checks() if one[0].startswith(begin))
    monkeypatch.setattr(gpu, "checks", lambda: [found])
    assert gpu.run("cpu", minutes=1) == 0
    assert ": passed: " in capsys.readouterr().out


def test_a_text_is_that_of_the_cpu():
    assert gpu.text("llama-mini", "streaming-llm", {}, "cpu", num_tokens=20).endswith(" tokens")


def test_each_command_is_under_fire_or_writes_nothing():
    attacked = [command.words for command in under_fire.COMMANDS]
    for name in catalogue.COMMANDS:
        is_attacked = any(words.startswith(name) for words in attacked) or name == "serve"
        assert is_attacked != (name in under_fire.NOT_HERE), name
        kinds = catalogue.Command(name).all_settings().values()
        fields = (field for kind in kinds for field in dataclasses.fields(kind))
        if any(field.metadata.get("writes") for field in fields):
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


def test_a_step_takes_one_token_and_calls_each_layer():
    calls = calls_of_step("gpt2-mini", "streaming-llm", num_steps=1)
    assert calls["kvalign.streaming.loop", "Row.choose"] == 1
    assert calls["kvalign.cache.layer", "StreamingLayer.update"] == 6


@pytest.mark.slow
def test_a_stream_loads_none_of_what_it_works_without():
    assert all(importlib.util.find_spec(f"kvalign.{one}") for one in APART)
    lines = lines_of_core()
    assert not lines["apart"] and lines["cache"] and lines["streaming"]
