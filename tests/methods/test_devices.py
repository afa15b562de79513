"""A model on another device than the CPU: every method gives what it gives on the CPU, and nothing
mixes tensors of the two.
"""

import copy
from functools import partial
from itertools import islice

import pytest
import torch
from helpers.methods import WAYS, made
from helpers.other_device import NAME, moved
from helpers.tiny_models import tiny_model

from kvalign import load_stream, stream, verify
from kvalign.memory import memories
from kvalign.streaming.sampling import Sampling

CASES = [
    *WAYS,
    *(("streaming-llm", "llama", dict(policy=name)) for name in ("h2o", "keydiff")),
    ("streaming-llm", "llama", dict(cache_dtype="int8")),
    ("streaming-llm", "llama", dict(memory=30)),
    ("streaming-llm", "llama", dict(memory=30, cache_dtype="int8")),
    ("tables", "gpt2", dict(memory=30)),
    ("tables", "gpt2", dict(memory=30, recall_places="age")),
    ("tables", "llama", dict(memory=30)),
]


MARKED = [pytest.param(*x, marks=pytest.mark.slow if i % 4 else ()) for i, x in enumerate(CASES)]


@pytest.mark.parametrize(("name", "kind", "sizes"), MARKED)
def test_it_gives_the_same(name, kind, sizes, models, ids):
    one = made(name, models[kind], **sizes)
    model = moved(copy.deepcopy(models[kind]))
    assert model.device.type == NAME
    other = made(name, model, **sizes)
    for start, end in ((0, 30), (30, 31), (31, 32), (32, 45), (45, 46)):
        expected = one.feed(ids[:, start:end])
        found = other.feed(ids[:, start:end].to(NAME))
        assert found.device.type == NAME
        assert torch.allclose(found.cpu(), expected, atol=1e-5)


@pytest.fixture(params=["host", "card"])
def place(request, monkeypatch):
    """Where a memory lies: a card has room for it, or not."""
    if request.param == "card":
        monkeypatch.setattr(memories, "is_on_card", lambda device: device.type == NAME)
        return NAME
    return "cpu"


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_memory_lies_where_there_is_room(dtype, atol, place, ids):
    """And its stream goes on where it was not begun. Our kernel searches heads of 16."""
    here = tiny_model("llama", head_dim=16).to(dtype)
    there = moved(copy.deepcopy(here))
    one, other = (made("streaming-llm", model, memory=100) for model in (here, there))
    expected = [one.feed(ids[:, start:end]) for start, end in ((0, 40), (40, 41), (41, 42))]
    found = [other.feed(ids[:, :40].to(NAME))]
    of_layers = other.cache.memory.of.values()
    assert all(x.device.type == place for memory in of_layers for x in memory.entries)
    assert all(layer.entries.data.keys.device.type == NAME for layer in other.cache.layers)
    state = {name: x.cpu() for name, x in other.state().items()}
    for start in (40, 41):
        found.append(other.feed(ids[:, start : start + 1].to(NAME)))
    for model, device in ((here, "cpu"), (there, NAME)):
        again = made("streaming-llm", model, memory=100)
        again.restore(state)
        found += [again.feed(ids[:, start : start + 1].to(device)) for start in (40, 41)]
    for x, y in zip(found, [*expected, *expected[1:], *expected[1:]], strict=True):
        assert torch.allclose(x.cpu(), y, atol=atol)


@pytest.mark.parametrize("is_int8", [False, True])
def test_rows_join_where_one_card_has_no_room(is_int8, ids, monkeypatch):
    """Then all lie on the host. They may be edited, before and after."""
    here = tiny_model("llama", head_dim=16)
    there = moved(copy.deepcopy(here))
    sizes = dict(memory=100) | (dict(cache_dtype="int8") if is_int8 else {})

    def rows(model, device):
        first, second = (made("streaming-llm", model, **sizes) for _ in range(2))
        monkeypatch.setattr(memories, "is_on_card", lambda device: device.type == NAME)
        first.feed(ids[:1, :40].to(device))
        first.edit(6, 9, ids[:1, 40:44].to(device))
        monkeypatch.undo()
        second.feed(ids[1:, :35].to(device))
        places = [x.cache.memory.of[0].device.type for x in (first, second)]
        first.join([second])
        logits = [first.feed(ids[:, i : i + 1].to(device)) for i in (44, 45)]
        return places, first.cache.memory.of[0].device.type, torch.cat(logits).cpu()

    *_, expected = rows(here, "cpu")
    places, joined, found = rows(there, NAME)
    assert places == [NAME, "cpu"] and joined == "cpu"
    assert torch.allclose(found, expected, atol=0.02 if is_int8 else 1e-5)


@pytest.mark.slow
def test_verify_knows_a_memory_elsewhere(place):
    make_it = partial(made, "streaming-llm", cache_size=5, num_sinks=1, memory=12)
    names = ("stored", "recalled", "all-recalled")
    model = moved(tiny_model("llama", num_hidden_layers=1))
    found = verify(model, make_it, num_steps=30, invariants=names)
    assert [(x.name, x.state) for x in found] == [(name, "passed") for name in names]


def test_tensors_of_two_devices_do_not_mix():
    one, other = torch.ones(2), torch.ones(2, device=NAME)
    with pytest.raises(RuntimeError, match="tensors on two devices"):
        one + other
    with pytest.raises(RuntimeError, match="tensors on two devices"):
        torch.cat([other, one])
    assert (other + torch.tensor(1.0)).device.type == NAME and (other.cpu() + one).sum() == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "how"),
    [
        ("gpt2-mini", "kvalign", dict(lookup=8)),
        ("llama-mini", "streaming-llm", dict(do_sample=True)),
        ("llama-mini", "streaming-llm", dict(memory=60)),
    ],
)
def test_a_text_is_written_as_here(name, method, how, minis, tmp_path, monkeypatch):
    """Also after it was saved there, and loaded here, where no random numbers go on."""
    new = Sampling.generator  # the device has no random numbers of its own
    monkeypatch.setattr(memories, "is_on_card", lambda device: device.type == NAME)
    monkeypatch.setattr(Sampling, "generator", lambda self, _, row=0: new(self, "cpu", row))
    loaded = minis[name]
    there = moved(copy.deepcopy(loaded.model))
    how = dict(method=method, cache_size=12, max_new_tokens=14, do_sample=False, seed=0) | how
    expected, written = (
        stream(model, loaded.tokenizer, "The history of the island. The history", **how)
        for model in (loaded.model, there)
    )
    text = "".join(islice(written, 7))
    written.save(tmp_path / "saved")
    after = load_stream(tmp_path / "saved", loaded.model, loaded.tokenizer)
    expected = "".join(expected)
    assert expected == text + "".join(written)
    assert how["do_sample"] or expected == text + "".join(after)
