"""Every architecture against plain transformers, in a few cases each: the others of the tests run
on those of `KINDS`.
"""

import pytest
import torch
from helpers.methods import CACHE_SIZE, STREAMING, make, step, tables
from helpers.pairwise import one_of_each
from helpers.tiny_models import MORE_KINDS, tiny_model

import kvalign
from kvalign.models.architectures import FAMILIES, REGISTERED, spec_of, window_of

FALCON_ALIBI = "falcon alibi"
CASES = (*MORE_KINDS, FALCON_ALIBI)
MOVED = [case for case in CASES if FAMILIES.get(case) != "learned"]


def tiny(case, **changes):
    kind, *ways = case.split()
    return tiny_model(kind, **dict.fromkeys(ways, True), **changes)


@pytest.fixture(scope="module")
def made():
    """Models by case, made when they are asked for."""
    models = {}

    def model_of(case):
        if case not in models:
            models[case] = tiny(case)
        return models[case]

    return model_of


def band(model, num):
    """Masks of a pass over so many tokens, each of which sees the C before it; or as many as its
    layer sees. By type of layer, where a model has several.
    """
    back = torch.arange(num)[:, None] - torch.arange(num)

    def mask(num_seen):
        visible = (back >= 0) & (back < num_seen)
        return torch.finfo(torch.float32).min * (~visible)[None, None].float()

    window = window_of(model.config)
    if spec_of(model.config).states:  # which go by no mask
        return {"full_attention": mask(CACHE_SIZE + 1), "conv": None}
    if window is None:
        return mask(CACHE_SIZE + 1)
    kinds = {"full_attention": CACHE_SIZE + 1, "sliding_attention": window}
    return {kind: mask(num_seen) for kind, num_seen in kinds.items()}


@pytest.mark.parametrize("case", [case for case in MOVED if case != FALCON_ALIBI])
def test_a_window_is_one_pass_in_a_band(case, made, ids):
    """Far beyond the context length, all positions computed anew, no rotation of ours."""
    model = made(case)
    num = 60 if case in ("codegen", "gptj") else 70  # their tables of angles end
    ids, positions = ids[:, :num], torch.arange(num).expand(2, -1)
    plain = model(input_ids=ids, attention_mask=band(model, num), position_ids=positions).logits
    streamed = step(make("window", model), ids, CACHE_SIZE)
    assert torch.allclose(streamed, plain.transpose(0, 1)[CACHE_SIZE - 1 :], atol=1e-4)


def depths(model):
    """Changes to a model of one layer, of each type that it has."""
    config = model.config
    one = dict(num_hidden_layers=1)
    if hasattr(config, "no_rope_layers"):
        return [dict(one, no_rope_layers=[turns]) for turns in (0, 1)]
    if kinds := sorted({*(getattr(config, "layer_types", None) or ())} - {"conv"}):
        return [dict(one, layer_types=[kind]) for kind in kinds]
    return [dict(n_layer=1) if "n_layer" in config.attribute_map.values() else one]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_evicted"), one_of_each(MOVED, [1, 4]))
def test_one_layer_streams_exactly(case, num_evicted, made, ids):
    """With sinks: with one layer, keys know nothing of evicted tokens."""
    sizes = dict(num_sinks=4, num_evicted=num_evicted)
    for depth in depths(made(case)):
        model = tiny(case, **depth)
        streamed, encoded = (
            step(make(name, model, **sizes), ids[:, :40], CACHE_SIZE + 1)
            for name in ("streaming-llm", "recompute")
        )
        assert torch.allclose(streamed, encoded, atol=1e-4), depth


def stream(name, model, **sizes):
    """A method by name, `kvalign` with tables."""
    aligner = {"aligner": tables(model, scale=0.3)} if name == "kvalign" else {}
    return make(name, model, warn=False, **sizes, **aligner)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case in REGISTERED])
def test_tables_are_read_as_they_are_written(case, made, ids):
    """In attention, and by moving entries: `moving` knows nothing of attention."""
    model = made(case)
    if window_of(model.config):
        model = tiny(case, sliding_window=CACHE_SIZE + 1)
    read = stream("kvalign", model)
    written = stream("kvalign", model)
    assert read.cache.realigner.strategy == "read"
    written.places_by = read.cache.realigner.moving
    written.reset()
    written.is_exact = False
    found, expected = (step(x, ids[:, :40], CACHE_SIZE + 1) for x in (read, written))
    assert torch.allclose(found, expected, atol=1e-4)


ROWS = ["dense masks kept", "rows moves positions", "chunks", "reorder", "save"]
PARTS = [*one_of_each(CASES, ROWS)]
"""Of each architecture a part of the quick ones of `kvalign verify`; of one with states, all."""
PARTS += [("lfm2", part) for part in ROWS if ("lfm2", part) not in PARTS]


@pytest.mark.slow
@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize(("case", "part"), PARTS)
def test_it_keeps_to_the_invariants(case, part, made):
    name = STREAMING[CASES.index(case) % len(STREAMING)]
    changes = dict(invariants=part.split(), num_steps=30)
    outcomes = kvalign.verify(made(case), lambda x: stream(name, x, cache_size=8), **changes)
    assert not [x for x in outcomes if x.state == "failed"]
    assert any(x.state == "passed" for x in outcomes)
