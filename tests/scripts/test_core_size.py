"""The script that counts the calls of a decode step and the lines of the core."""

import importlib.util

import pytest

from kvalign.streaming.answer import StopStrings
from scripts.core_size import GUESTS, calls_of, calls_of_step, circles, lines_of_core


def test_calls_are_counted_by_function():
    stops = StopStrings(("end",))
    calls = calls_of(lambda: [stops.read("an "), stops.read("island"), stops.rest()])
    module = "kvalign.streaming.answer"
    assert calls[module, "StopStrings.read"] == 2 and calls[module, "StopStrings.rest"] == 1
    assert calls_of(lambda: sorted("island")).total() == 0


def test_a_step_takes_one_token_and_calls_each_layer():
    calls = calls_of_step("gpt2-mini", "streaming-llm", num_steps=1)
    assert calls["kvalign.streaming.loop", "Row.take"] == 1
    assert calls["kvalign.cache.layer", "StreamingLayer.update"] == 6


@pytest.mark.slow
def test_guests_are_modules_and_the_core_loads_none():
    assert all(importlib.util.find_spec(f"kvalign.{guest}") for guest in GUESTS)
    lines = lines_of_core()
    assert not lines["guests"] and lines["cache"] and lines["streaming"]


def test_there_is_no_circle_of_imports():
    assert circles() == []
