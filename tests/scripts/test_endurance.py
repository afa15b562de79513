"""The endurance script on a short stream: combinations are sound, and what is not sound is
said.
"""

import json
from mmap import mmap

import pytest
from helpers.pairwise import covering

from scripts import endurance
from scripts.endurance import EnduranceSettings, endure, faults

pytestmark = pytest.mark.slow

# A few pages of memory come and go, which is much for a stream as short as this one.
SHORT_SLOPE = 2e6  # bytes per 1000 tokens


@pytest.mark.slow
def test_short_streams_are_sound(capsys, monkeypatch):
    """All methods with all positions, each of the two in both precisions."""
    pairs = [lambda *case, i=i, j=j: (case[i], case[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    short = covering(endurance.COMBINATIONS, *pairs)
    monkeypatch.setattr(endurance, "COMBINATIONS", short)
    settings = EnduranceSettings(num_tokens=20 * endurance.PERIOD, max_slope=SHORT_SLOPE)
    assert endurance.run(settings) == 0
    *lines, document = capsys.readouterr().out.strip().splitlines()
    cases = json.loads(document)["cases"]
    assert len({(c["kind"], c["method"], c["dtype"]) for c in cases}) == len(lines) == 6
    assert all(line.endswith("; sound") for line in lines)
    for case in cases:
        assert case["num_tokens"] == settings.num_tokens and case["max_stored"] == 32
        # Tokens are computed at the end of the cache; rotary positions run on inside the context.
        expected = {"gpt2": 32, "llama": endurance.CONTEXT_LEN - 2, "bloom": 0}
        assert case["max_position"] == expected[case["kind"]]
        # Frames begin elsewhere in the period: half precision rounds another way.
        exact = case["dtype"] == "float32" or case["kind"] != "llama"
        assert case["ratio"] == pytest.approx(1, abs=1e-6 if exact else 1e-3)


@pytest.mark.slow
def test_a_leak_is_said(monkeypatch):
    leaked, note = [], endurance.Stream._note

    def leak(stream, logits):
        # 256 kB per call, some 30 calls per thousand tokens; pages that no earlier test freed.
        leaked.append(mmap(-1, 1 << 18))
        leaked[-1].write(bytes([1]) * (1 << 18))
        return note(stream, logits)

    monkeypatch.setattr(endurance.Stream, "_note", leak)
    case = endure("gpt2", "streaming-llm", "float32", 100 * endurance.PERIOD)
    assert any("bytes_per_1000_tokens above" in fault for fault in faults(case, SHORT_SLOPE))


@pytest.fixture(scope="module")
def sound():
    case = endure("gpt2", "streaming-llm", "float32", 20 * endurance.PERIOD)
    assert not faults(case, SHORT_SLOPE)
    return case


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(bytes_per_1000_tokens=101.0), "bytes_per_1000_tokens above 100"),
        (dict(max_position=64), "max_position above 63"),
        (dict(max_stored=33), "max_stored above 32"),
        (dict(ratio=1.0011), "ratio off by more than 0.001"),
        (dict(ratio=float("nan")), "ratio off by more than 0.001"),
        (dict(ratio=0.989, dtype="bfloat16"), "ratio off by more than 0.01"),
    ],
)
def test_faults_are_said(sound, changes, fault):
    case = sound | {"bytes_per_1000_tokens": 0.0} | changes
    assert faults(case, 100) == [fault]


def test_faults_of_a_stream_end_with_code_1(monkeypatch, capsys, sound):
    monkeypatch.setattr(endurance, "endure", lambda *args: sound | {"num_nan": 3})
    assert endurance.run(EnduranceSettings(max_slope=SHORT_SLOPE)) == 1
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["sound"]


def test_a_model_that_gives_nan_is_noticed(monkeypatch):
    def broken(kind, **changes):
        model = tiny_model(kind, **changes)
        model.lm_head.weight[3] = float("nan")
        return model

    tiny_model = endurance.tiny_model
    monkeypatch.setattr(endurance, "tiny_model", broken)
    case = endure("llama", "kvalign", "float32", 20 * endurance.PERIOD)
    assert any(fault.startswith("num_nan") for fault in faults(case, SHORT_SLOPE))
