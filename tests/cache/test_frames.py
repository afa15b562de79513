"""Rotary positions run on for a frame and are then turned back: whatever its length, the model
computes the same, at positions that it has.
"""

import pytest
import torch
from helpers.comings import come_and_go
from helpers.methods import make, step
from helpers.tiny_models import CONTEXT_LEN, ROTARY_KINDS, SCALINGS, tiny_model

from kvalign.cache.realigner import FromBirth
from kvalign.models.architectures import rotation_of, spec_of


@pytest.fixture
def positions(monkeypatch):
    """Positions that models are told of while this runs."""
    told = []

    def record(model):
        rotation_of(model)  # which is measured, once
        rotary = model.base_model.rotary_emb
        encode = rotary.forward

        def recording(x, position_ids, *args, **kwargs):
            told.append(int(position_ids.max()))
            return encode(x, position_ids, *args, **kwargs)

        monkeypatch.setattr(rotary, "forward", recording)
        return told

    return record


@pytest.mark.parametrize(
    ("kind", "cache_size"), [*((kind, 20) for kind in ROTARY_KINDS), ("llama", 40), ("llama", 50)]
)
def test_positions_stay_within_the_context_where_it_leaves_room(
    kind, cache_size, models, ids, positions
):
    told, ids = positions(models[kind]), ids[:, :100]
    method = make("streaming-llm", models[kind], cache_size=cache_size)
    for i in range(ids.shape[1]):
        method.feed(ids[:, i : i + 1])
        assert method.cache.get_seq_length() < CONTEXT_LEN
    assert cache_size < max(told) < CONTEXT_LEN and len(told) == ids.shape[1]
    method.reset()
    method.feed(ids)
    assert max(told) < CONTEXT_LEN


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
@pytest.mark.parametrize("num_evicted", [1, 4])
@pytest.mark.parametrize("room", [1, 12])
def test_ropes_that_change_with_the_length_do_not(rope, num_evicted, room, ids, positions):
    """However full: no position reaches the length beyond which they are other rotations. Of one
    layer keys know nothing of evicted tokens: the stream must equal re-encoding what it kept.
    """
    model = tiny_model("llama", rope_parameters=SCALINGS[rope], num_hidden_layers=1)
    length = spec_of(model.config).context_len
    assert length == (CONTEXT_LEN if rope == "dynamic" else 32)
    before = model.base_model.rotary_emb.inv_freq.clone()
    sizes, ids = dict(cache_size=length - room, num_sinks=4, num_evicted=num_evicted), ids[:, :100]
    oracle = step(make("recompute", model, **sizes), ids, length - room + 1)
    told = positions(model)
    streamed = step(make("streaming-llm", model, **sizes), ids, length - room + 1)
    assert torch.allclose(streamed, oracle, atol=1e-4)
    assert max(told) < length
    assert torch.equal(model.base_model.rotary_emb.inv_freq, before)


def test_a_full_context_leaves_a_quarter_beyond(models, ids, positions):
    """Of ropes that are the same at any length; else all keys would be turned at each step."""
    told = positions(models["llama"])
    method = make("streaming-llm", models["llama"], cache_size=CONTEXT_LEN - 1)
    step(method, ids, CONTEXT_LEN)
    assert max(told) == CONTEXT_LEN - 1 + (CONTEXT_LEN - 1) // 4 - 1


def test_rows_that_come_and_go_return_each_from_its_own_positions():
    """Where the context leaves no frame; they hold what each holds alone."""
    model = tiny_model("llama", rope_parameters=SCALINGS["dynamic"])
    method = make("streaming-llm", model, cache_size=55)
    assert isinstance(method.cache.realigner, FromBirth)
    when = dict(num_steps=40, leave=12, join=24, look=lambda one: one.cache.index().tolist())
    batch, rows, held = come_and_go(method, (6, 70, 17, 90), (2, 1), **when)
    assert [batch.cache.index(i).tolist() for i in range(3)] == [held[row] for row in rows]
