"""The script that compares a GPU with the CPU: here with the CPU."""

import pytest

from scripts import gpu


def of_title(begin):
    return next((title, check) for title, check in gpu.checks() if title.startswith(begin))


@pytest.mark.parametrize(
    "begin",
    ["weights of int8", "float32, tables", "bfloat16, window", "segments, window", "float32, 1 r"],
)
def test_the_cpu_gives_what_the_cpu_gives(begin, monkeypatch, capsys):
    found = of_title(begin)
    monkeypatch.setattr(gpu, "checks", lambda: [found])
    assert gpu.run("cpu", minutes=1) == 0
    assert ": passed: " in capsys.readouterr().out


def test_a_text_is_that_of_the_cpu():
    assert gpu.text("llama-mini", "streaming-llm", {}, "cpu", num_tokens=20).endswith(" tokens")


def test_what_differs_fails_or_is_not_reached_is_told(monkeypatch, capsys):
    def differs(device):
        raise AssertionError("logits differ")

    def fails(device):
        raise RuntimeError("no kernel")

    told = [("one", differs), ("two", fails)]
    monkeypatch.setattr(gpu, "checks", lambda: told)
    assert gpu.run("cpu", minutes=1) == 2
    assert gpu.run("cpu", minutes=0) == 0
    out = capsys.readouterr().out
    assert "one: DIFFERS: logits differ" in out and "two: FAILED: RuntimeError: no kernel" in out
    assert "two: not measured" in out and "0 passed, 0 failed, 2 not measured" in out
