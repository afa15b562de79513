"""All methods keep to the invariants on all architectures, and a bug that is planted is found where
it belongs.
"""

from dataclasses import replace
from functools import cached_property
from inspect import getattr_static

import pytest
import torch
from helpers.methods import STREAMING, make, network, tables
from helpers.pairwise import one_of_each
from helpers.tiny_models import KINDS, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvalign
from kvalign.cache import edits
from kvalign.cache.passes import Pass
from kvalign.cache.realigner import Rotating
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.cache.window_layer import WindowLayer
from kvalign.invariants import INVARIANTS
from kvalign.memory.memory import Memory
from kvalign.methods.cached import Cached
from kvalign.models.architectures import REGISTERED

SIZE, NUM_STEPS = 8, 40
pytestmark = pytest.mark.usefixtures("short_runs")
MEMORY = {"stored", "recalled", "all-recalled"}
"""Rows of what has one."""
EDITS = {"undo", "cut", "put-back"}
"""Rows of what can be edited."""


def outcomes_of(model, make_one, invariants=None, **changes):
    changes = {"num_steps": NUM_STEPS} | changes
    found = kvalign.verify(model, make_one, invariants=invariants, **changes)
    return {outcome.name: outcome for outcome in found}


def states(outcomes):
    return {name: outcome.state for name, outcome in outcomes.items()}


def failed(outcomes):
    return [f"{x.name}: {x.figure} {x.note}" for x in outcomes.values() if x.state == "failed"]


ALIGNERS = {tables: dict(scale=0.2, num_sinks=2), network: dict(train=True)}
# What streams: methods by name, aligners by what makes them.
STREAMS = [name for name in STREAMING if name != "kvalign"] + list(ALIGNERS)
WHOLE = [("streaming-llm", "llama"), (tables, "gpt2"), ("streaming-llm", "bloom")]
"""To which all that needs no memory applies, but positions to ALiBi."""
LONG = ("half-entries", "half-logits", "kl")
SHORT = [name for name in INVARIANTS if name not in LONG]


def of(stream, model):
    """A method of that name, or kvalign with an aligner that is made so."""
    if isinstance(stream, str):
        return make(stream, model, cache_size=SIZE, warn=False)
    return make("kvalign", model, cache_size=SIZE, aligner=stream(model, **ALIGNERS[stream]))


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        pytest.param(*x, marks=pytest.mark.slow if i else ())
        for i, x in enumerate([*one_of_each(STREAMS, KINDS, but=WHOLE), *WHOLE])
    ],
)
def test_it_keeps_to_all(stream, kind, models, monkeypatch):
    """Each method and aligner, and each architecture; three of them over a long stream, too."""
    if (stream, kind) == WHOLE[0]:
        monkeypatch.undo()  # `short_runs`: keys run on for as long as they do
    rows = list(INVARIANTS) if (stream, kind) in WHOLE else SHORT
    outcomes = outcomes_of(models[kind], lambda model: of(stream, model), rows)
    assert list(outcomes) == rows
    assert not failed(outcomes)
    not_tried = {x for x, state in states(outcomes).items() if state == "not applicable"}
    if (stream, kind) in WHOLE:
        assert not_tried - MEMORY == ({"positions"} if kind == "bloom" else set())
    assert not_tried >= MEMORY
    if stream in ALIGNERS:
        assert ("moves" in not_tried) == (stream is network)
        assert ("evicting-chunks" in not_tried) != (stream is tables and kind in REGISTERED)


MEMORIES = [
    ("llama", None, dict(recall_places="rank", num_recalled=3)),
    ("llama", None, dict(recall_layers="1", cache_dtype="int8")),
    ("gpt2", tables, dict(recall_places="age", cache_dtype="int8")),
    ("gpt2", tables, {}),
    ("llama", tables, dict(num_recalled=3)),
]


def with_memory(model, aligner, **changes):
    extra = {"aligner": aligner(model, **ALIGNERS[aligner])} if aligner else {}
    name = "kvalign" if aligner else "streaming-llm"
    return make(name, model, **dict(cache_size=SIZE, memory=40) | extra | changes)


@pytest.mark.parametrize(
    ("kind", "aligner", "changes"),
    [pytest.param(*x, marks=pytest.mark.slow if x[2] else ()) for x in MEMORIES],
)
def test_a_memory_holds_what_it_should_and_is_edited(kind, aligner, changes, models):
    rows = [*MEMORY, *EDITS]
    outcomes = outcomes_of(models[kind], lambda m: with_memory(m, aligner, **changes), rows)
    assert set(states(outcomes).values()) == {"passed"}, failed(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "aligner"), [("llama", None), ("gpt2", tables)])
def test_a_memory_keeps_to_all(kind, aligner, models):
    outcomes = outcomes_of(models[kind], lambda model: with_memory(model, aligner))
    assert not failed(outcomes)
    not_tried = {x for x, state in states(outcomes).items() if state == "not applicable"}
    assert not_tried >= {"half-logits", "kl"} and not not_tried & MEMORY
    assert ("moves" in not_tried) == (aligner is None)


@pytest.mark.slow
def test_a_cache_that_keeps_all():
    """What needs an eviction does not apply, all else holds; the model is left as it is."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    outcomes = outcomes_of(model, lambda model: DynamicCache())
    applies = {"dense", "rows", "chunks", "masks", "reorder", "repeat", "save"}
    assert {x for x, state in states(outcomes).items() if state == "passed"} == applies
    not_tried = {name: x.note for name, x in outcomes.items() if not x.unit}
    assert all(not_tried.pop(name).startswith("a cache alone is not edited") for name in EDITS)
    assert all(note.startswith("it evicts nothing") for note in not_tried.values())
    assert len(outcomes) == len(INVARIANTS)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert model.dtype == torch.float32 and not model.model.layers[0]._forward_hooks


@pytest.mark.slow
def test_a_model_that_is_not_known():
    """Of one that KV-Align does not stream, here for its RoPE, all but positions can be tried."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    config = AutoConfig.for_model(
        "starcoder2", vocab_size=96, max_position_embeddings=32, sliding_window=8, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.config.rope_parameters = {"rope_type": "spiral"}
    outcomes = outcomes_of(model, lambda model: DynamicCache(config=model.config))
    not_tried = {x for x, state in states(outcomes).items() if state == "not applicable"}
    assert not_tried == {"moves", *MEMORY, *EDITS}
    assert [x for x, state in states(outcomes).items() if state == "failed"] == ["positions"]


# Bugs that authors of caches ship, planted one at a time.
PLANTED = {}
"""By bug: where it is, what stands there, and the rows that find it, first that of its own."""


def planted(place, name, *rows):
    """Have a function stand in place of another, which is its first argument, or of a value."""

    def plant(wrong):
        there = getattr_static(place, name)
        is_value = isinstance(there, cached_property)
        right = there.func if is_value else there

        def other(*args):
            return wrong(right, *args)

        made = property(other) if is_value else other
        PLANTED[wrong.__name__] = place, name, made, rows

    return plant


@planted(WindowLayer, "move", "moves")
def shift_by_two(right, self, step, shifts):
    right(self, step, [shift + 2 for shift in shifts])


@planted(Pass, "_newest", "kept", "moves", "evicting-chunks", "save")
def sinks_lost(right, self):
    return self.of_rows("end")[:1] % self.sizes.first_input_len


@planted(StreamingCache, "_rotate_sinks", "rows", "reorder", "evicting-chunks")
def sinks_of_the_first_row(right, self, step):
    right(self, step)
    for layer in self.attention if any(map(self.sizes.num_dropped, step.seen)) else ():
        sinks = layer.entries.data.keys[:, :, : self.sizes.num_sinks]
        sinks.copy_(sinks[:1].expand_as(sinks))


@planted(StreamingCache, "get_mask_sizes", "masks")
def mask_short(right, self, query_length, layer_idx):
    length, offset = right(self, query_length, layer_idx)
    return (length - 1 if max(self.seen, default=0) > SIZE else length), offset


@planted(Rotating, "frame", "positions")
def positions_run_on(right, self, sizes, context_len):
    return replace(sizes, realign_every=10**6)


@planted(StreamingCache, "reorder_cache", "reorder")
def reorder_ignored(right, self, beam_idx):
    pass


@planted(StreamingCache, "batch_repeat_interleave", "repeat")
def repeat_in_rounds(right, self, repeats):
    self.select([*range(len(self.seen))] * repeats)


@planted(StreamingCache, "state", "save")
def save_drops_sinks(right, self):
    return {k: 0 * x if "sinks" in k else x for k, x in right(self).items()}


@planted(StreamingCache, "_end", "chunks", "evicting-chunks", "masks", "kept", "moves", *EDITS)
def an_input_counts_once(right, self, step):
    right(self, replace(step, num_new=min(step.num_new, 1)))


@planted(Rotating, "frame", "half-entries")
def rounded_at_each_move(right, self, sizes, context_len):
    return replace(sizes, realign_every=1)


@planted(WindowLayer, "take", "dense", "chunks", "evicting-chunks")
def first_entry_missing(right, self, step, new):
    keys, values = right(self, step, new)
    if step.is_decode:
        return keys, values
    return keys, torch.cat([0 * values[:, :, :1], values[:, :, 1:]], 2)


@planted(Memory, "write", "stored")
def stored_in_half_precision(right, self, seen, new):
    right(self, seen, new.map(lambda x: x.half().to(x.dtype)))


@planted(Memory, "find", "recalled")
def ages_of_the_first_head(right, self, *asked):
    found = right(self, *asked)
    return found._replace(ages=found.ages[:, :1].expand_as(found.ages))


@planted(Memory, "find", "all-recalled")
def the_oldest_taken_back_twice(right, self, *asked):
    found = right(self, *asked)
    oldest = [0, 0, *range(2, found.ages.shape[-1])]
    entries = found.entries.map(lambda x: x[..., oldest, :])
    return found._replace(entries=entries, ages=found.ages[..., oldest])


@planted(edits, "rotated", "cut")
def turned_the_other_way(right, rotation, layer, entries, shift):
    return right(rotation, layer, entries, -shift)


@planted(Cached, "edit", "put-back")
def put_in_backwards(right, self, start, stop, *new):
    return right(self, start, stop, *(ids.flip(1) for ids in new))


@planted(Cached, "undo_edit", "undo")
def taken_back_but_counted(right, self):
    num_tokens = self.cache.num_tokens
    right(self)
    self.cache.num_gone = [x - y for x, y in zip(num_tokens, self.cache.seen, strict=True)]


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(x, marks=() if x in ("mask_short", "reorder_ignored") else pytest.mark.slow)
        for x in PLANTED
    ],
)
def test_a_planted_bug_is_found_where_it_is(bug, monkeypatch):
    """Rows that it has nothing to do with pass: some of a short stream, others for each bug."""
    *there, (row, *more) = PLANTED[bug]
    monkeypatch.setattr(*there)
    if bug == "rounded_at_each_move":
        monkeypatch.setattr(Rotating, "within", lambda self, sizes, context_len: self)
    memory = dict(memory=40) if row in MEMORY else {}
    others = [name for name in SHORT if memory or name not in MEMORY]
    rows = {row, *more, *others[[*PLANTED].index(bug) % 6 :: 6], *(MEMORY if memory else ())}
    sizes = dict(cache_size=SIZE + 4 * (row in LONG), **memory)
    model = tiny_model("llama", num_hidden_layers=1)
    outcomes = outcomes_of(model, lambda model: make("streaming-llm", model, **sizes), [*rows])
    failing = [name for name, state in states(outcomes).items() if state == "failed"]
    assert row in failing and outcomes[row].look_at == INVARIANTS[row].look_at
    assert set(failing) <= {row, *more}


def test_a_cache_that_raises_or_gives_no_number_fails(models):
    """And the others are still tried."""

    class Broken(DynamicCache):
        def reorder_cache(self, beam_idx):
            raise ValueError("not here")

        def batch_repeat_interleave(self, repeats):
            for layer in self.layers:
                layer.keys = layer.keys.repeat_interleave(repeats, 0) * float("nan")
                layer.values = layer.values.repeat_interleave(repeats, 0)

    rows = ["reorder", "repeat", "dense"]
    outcomes = outcomes_of(models["llama"], lambda model: Broken(), rows)
    assert [outcomes[row].state for row in rows] == ["failed", "failed", "passed"]
    assert outcomes["reorder"].note == "it raised ValueError: not here"
    assert outcomes["repeat"].figure is None and outcomes["repeat"].note.startswith("no number")
