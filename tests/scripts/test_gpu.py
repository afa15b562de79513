"""The script that compares a GPU with the CPU: here with the CPU."""

import pytest

from scripts import gpu


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
