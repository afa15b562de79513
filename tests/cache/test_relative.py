"""The relative form is stepping: every family, any sizes, any cut into segments."""

import weakref

import pytest
import torch
from helpers.methods import CACHE_SIZE, make

from kvalign.cache import band, segments
from kvalign.streaming.scoring import losses, score, score_stepwise


def plain_band(query, keys, values, width, scale):
    """`band.band`, by all scores; 7 where a query sees nothing, which nobody may read."""
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    ends = torch.arange(query.shape[2])[:, None] + keys.shape[2] - query.shape[2]
    ages = ends - torch.arange(keys.shape[2])
    hidden = (ages < 0) | (ages > width)
    scores = (query @ keys.mT * scale).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1).nan_to_num(7.0) @ values
    return out.transpose(1, 2).contiguous(), scores.logsumexp(-1)


@pytest.mark.parametrize(("kind", "num_sinks"), [("llama", 4), ("gpt2", 2), ("qwen3", 0)])
def test_a_band_and_the_sinks_are_one_attention(models, kind, num_sinks, ids, monkeypatch):
    """As on CUDA: a kernel reads the window, and the sinks are merged with what it gives."""
    sizes = {"num_sinks": num_sinks} if num_sinks else {}
    method = make("streaming-llm" if num_sinks else "window", models[kind], **sizes)
    expected = score_stepwise(method, ids[:, :120])
    monkeypatch.setattr(segments, "takes_bands", lambda query: True)
    monkeypatch.setattr(band, "band", plain_band)
    for segment_len in (3, 256):
        monkeypatch.setattr(segments, "SEGMENT_LEN", segment_len)
        assert torch.allclose(score(method, ids[:, :120]), expected, atol=2e-4)


@pytest.mark.parametrize("name", ["streaming-llm", "recompute"])
def test_what_a_piece_of_text_made_is_gone_before_the_next(name, models, ids, monkeypatch):
    """A small tensor that stays behind each piece's logits makes the process grow by all logits."""
    monkeypatch.setattr(segments, "SEGMENT_LEN", 32)
    monkeypatch.setattr("kvalign.streaming.scoring.BATCH_TOKENS", 4 * CACHE_SIZE)
    made = []

    def measure(logits, labels):
        assert all(one() is None for one in made)
        made.append(weakref.ref(found := losses(logits, labels)))
        return found

    score(make(name, models["llama"]), ids[:1], measure=measure)
    assert len(made) > 3
