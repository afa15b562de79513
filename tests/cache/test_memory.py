"""What a memory takes back is what was evicted and scores best, placed where it is said to lie."""

import mmap
import shutil
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import REGISTERED_KINDS, tiny_model
from torch import Tensor
from torch.testing import assert_close

from kvalign.aligners.entries import KV
from kvalign.cache.int8 import Int8
from kvalign.cache.layer import Form
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.memory import memory as memory_module
from kvalign.memory import recall_places, sketch, slots
from kvalign.memory.memory import Memory
from kvalign.memory.recall import QueryBatch
from kvalign.memory.recall_places import RecallPlaces
from kvalign.memory.sketch import BLOCK, PAGE
from kvalign.methods import make_cache, make_method
from kvalign.models import kernel

NUM, VOCAB = 150, 400
FLOATS = Form(torch.float32)
SIZES = dict(cache_size=16, num_sinks=2, memory=60, num_recalled=6)


@pytest.fixture(scope="module")
def large():
    """Models with so many tokens that none comes twice: scores have no ties."""
    return {kind: tiny_model(kind, vocab_size=VOCAB) for kind in REGISTERED_KINDS}


@pytest.fixture(scope="module")
def ids():
    rng = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(VOCAB - 2, generator=rng)[:NUM] + 2 for _ in range(2)])


def new(model, way="rotation", **changes):
    sizes = SIZES | {"recall_places": "age" if way == "table by age" else None} | changes
    if way == "rotation":
        return make_method("streaming-llm", model, **sizes)
    return make_method("kvalign", model, aligner=tables(model, scale=0.3), **sizes)


def stepped(method, ids):
    return torch.stack([method.feed(ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
@pytest.mark.parametrize(
    ("num_rows", "group", "num_queries", "head_dim", "num", "size"),
    [
        (1, 3, 1, 64, 9000, 200),  # 400 of 9 000 scores are exact
        (2, 16, 3, 64, 3000, 100),  # rows of their own, many heads to one of keys
        (2, 1, 5, 32, 300, 20),  # all
        (1, 2, 1, 16, 17, 20),  # of six that are lost three say the same
        (2, 3, 30, 80, 3000, 100),  # of tokens that ask together all are exact
        (1, 2, 30, 32, 9000, 200),  # or of those that lie as they came
    ],
)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "by_age"),
    [
        (torch.float32, "model", True),
        (torch.float16, "model", False),
        (torch.bfloat16, "model", True),
        (torch.float32, "int8", False),
    ],
)
def test_our_kernel_finds_what_pytorch_finds(
    num_rows, group, num_queries, head_dim, num, size, dtype, cache_dtype, by_age, monkeypatch
):
    """Which computes in float32, as our kernel does; of 8 bits, what it finds among floats. Of keys
    that are not alike at all it reads all blocks.
    """
    monkeypatch.setattr(memory_module, "FEWEST_BLOCKS", 10**4)
    monkeypatch.setattr(memory_module, "MOST_BLOCKS", 10**4)
    of_memory = dict(memory=8000, num_recalled=size // 4)
    sizes = CacheSizes(cache_size=size, num_sinks=4, cache_dtype=cache_dtype, **of_memory)
    rng = torch.Generator().manual_seed(num)
    held = KV(*(torch.randn(num_rows, 3, num, head_dim, generator=rng) for _ in range(2)))
    base = 9 * torch.randn(3, 1, head_dim, generator=rng)  # what all have
    held.keys.add_(base)
    held.keys[:, :, num // 2 : num // 2 + 9] = held.keys[:, :, :9]  # said again
    held.keys[:, :, 1:4] = held.keys[:, :, :1]
    held = held.map(lambda x: x.to(dtype))
    form, floats = Form(dtype), held.map(Tensor.float)
    if cache_dtype == "int8":
        form = Int8(dtype, base=base)
        floats = form.decode_at(form.encode_at(held, slice(0)), slice(0))
    places = RecallPlaces(sizes, 8000, by_age, is_free=by_age)
    memories = [Memory(held, form, places), Memory(floats, FLOATS, places)]
    for memory, own in zip(memories, (held, floats), strict=True):
        memory.write([sizes.num_sinks] * num_rows, own)
    queries = torch.randn(num_rows, 3, group, num_queries, head_dim, generator=rng)
    end = torch.full((num_rows,), num + sizes.num_sinks)
    seen = end[:, None] - 3 * torch.arange(num_rows)[:, None] - torch.arange(num_queries)
    assert all(memory.sketch is not None for memory in memories)
    memories[1].sketch = None
    asking = (QueryBatch(places, seen, end, int(seen.min())) for _ in memories)
    found, expected = (x.find(queries, asks) for x, asks in zip(memories, asking, strict=True))
    assert torch.equal(found.visible, expected.visible) and found.visible.any()
    assert found.visible.all() == (num > 30)
    assert torch.equal(found.ages[found.visible], expected.ages[found.visible])
    for x, y in zip(found.entries, expected.entries, strict=True):
        assert x.dtype == dtype and torch.equal(x[found.visible].float(), y[found.visible])


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
@pytest.mark.parametrize("parts", [[700], [33, 31, 512, 2048, 3000], [9000]], ids=str)
@pytest.mark.parametrize("by_age", [True, False])
def test_our_kernel_reads_few_blocks_of_a_memory_in_order(parts, by_age):
    """Of a ring that is overwritten, of a memory whose entries come in other parts, and of one that
    is restored.
    """
    num, sizes = 13_314, CacheSizes(cache_size=60, num_sinks=4, memory=9000, num_recalled=16)
    places = RecallPlaces(sizes, 8000, by_age, is_free=by_age)
    rng = torch.Generator().manual_seed(0)
    centers = torch.randn(2, 100, 32, generator=rng)
    which = torch.randint(100, (1, 2, num), generator=rng)
    keys = centers[torch.arange(2)[:, None], which] + 0.3 * torch.randn(
        1, 2, num, 32, generator=rng
    )
    held = KV(keys, torch.randn(keys.shape, generator=rng))
    memory, first = Memory(held, FLOATS, places), 0
    while first < num:
        for part in parts:
            memory.write([sizes.num_sinks + first], held.slots(first, min(part, num - first)))
            first = min(first + part, num)
    sketch, seen = memory.sketch, torch.full((1, 40), num + sizes.num_sinks)
    ordered = 0, 3  # page 2 has the newest entry, page 1 those that are not old enough
    assert (num - 1) % memory.num_slots == 2 * PAGE + 49  # the window has just left page 1
    assert sketch.is_ordered[0].tolist() == [page in ordered for page in range(4)]
    slots = sketch.fine[..., -2:].contiguous().view(torch.int16)[0, :, : 4 * PAGE, 0]
    in_turn = torch.arange(PAGE, dtype=torch.int16).expand(2, -1)
    for page, own in enumerate(slots.split(PAGE, 1)):
        assert torch.equal(own.sort(1).values, in_turn)
        assert torch.equal(own, in_turn) == (page not in ordered)
    queries = 2 * torch.randn(1, 2, 2, 40, 32, generator=rng)
    queries[:, :, :, 20:] = 0  # they ask for what is young

    def found_by(one, num=40):  # for so many tokens at once
        parts = zip(queries.split(num, 3), seen.split(num, 1), strict=True)
        found = [one.find(x, QueryBatch(places, n, n[0, :1], int(n.min()))) for x, n in parts]
        ages, visible = (torch.cat([x[i] for x in found], 2) for i in (1, 2))
        return found[0]._replace(ages=ages, visible=visible)

    restored = Memory(held, FLOATS, places)
    restored.restore(memory.entries.slots(0, memory.num_used), memory.base, memory.seen)
    assert torch.equal(restored.sketch.is_ordered, sketch.is_ordered)
    found = [found_by(memory), found_by(memory, num=1), found_by(restored)]
    memory.sketch = None
    expected = found_by(memory)
    for x in found:
        is_found = (expected.ages[..., None] == x.ages[..., None, :]) & x.visible[..., None, :]
        for asking, least in ((slice(20), 0.97 if by_age else 0.85), (slice(20, 40), 0.99)):
            visible = expected.visible[:, :, asking]
            assert is_found.any(-1)[:, :, asking][visible].float().mean() > least


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
@pytest.mark.parametrize("dim", kernel.DIMS)
def test_a_sketch_holds_turned_keys_in_2_and_in_4_bits(dim):
    held = sketch.Sketch(torch.empty(2, 3, 0, dim))
    held.lengthen(64)
    keys = 3 * torch.randn(2, 3, 21, dim, generator=torch.Generator().manual_seed(0))
    held.write(slice(None), 15, keys)
    turned = keys @ held.turn
    size = turned.square().mean(-1, keepdim=True).sqrt()
    scales, fine = held.scales[:, :, 15:36], held.fine[:, :, 15:36]
    assert torch.allclose(scales.float(), 0.996 * size[..., 0], rtol=1e-3)
    of_entry = fine[..., -4:].contiguous()
    assert torch.equal(of_entry[..., :2].contiguous().view(torch.float16)[..., 0], scales)
    slots = of_entry[..., 2:].contiguous().view(torch.int16)[..., 0]
    assert torch.equal(slots, torch.arange(15, 36, dtype=torch.int16).expand(2, 3, -1))
    # [B, H, entries, words, 4 bytes], of which each has a number of each word of 16 bytes
    words = held.numbers.transpose(3, 4).flatten(2, 3)[:, :, 15:36]
    fours = torch.stack([words >> 2 * i & 3 for i in range(4)], -2).flatten(3)
    halves = fine[..., :-4].unflatten(-1, (-1, 1, 8))
    sixteenths = torch.cat([halves & 15, halves >> 4], -2).flatten(3)
    for levels, step, num in ((fours, 0.996, 4), (sixteenths, 0.3352, 16)):
        expected = (turned / size / step + (num - 1) / 2).clamp(0, num - 1)
        assert ((levels - expected).abs() < 0.501).all()
    for past in (0, 15), (36, 64):
        assert not held.scales[:, :, slice(*past)].any() and not held.fine[:, :, slice(*past)].any()
    with pytest.raises(RuntimeError, match="not as it takes them"):
        held.write(slice(None), 44, keys)
    held.numbers = held.numbers[:, :, :2].contiguous()
    with pytest.raises(RuntimeError, match="not as it takes them"):
        held.write(slice(None), 0, keys)


@torch.no_grad()
@pytest.mark.parametrize("memory", [1, 2, 5, 20])
def test_what_a_memory_holds_for_a_few_tokens_alone_is_found_by_these(ids, memory):
    """In a segment, whose tokens ask together, as by single steps."""
    model = tiny_model("llama", vocab_size=VOCAB, head_dim=16)
    sizes = dict(memory=memory, num_recalled=min(memory, 6))
    expected, method = stepped(new(model, **sizes), ids), new(model, **sizes)
    for start in range(0, NUM, 50):
        logits = method.feed(ids[:, start : start + 50])
        assert torch.allclose(logits, expected[:, start + 49], atol=1e-4)


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
def test_our_kernel_refuses_pages_of_another_length(monkeypatch):
    monkeypatch.setattr(sketch, "PAGE", 1024)
    places = RecallPlaces(CacheSizes(**SIZES), 800, by_age=True, is_free=True)
    held, seen = KV(torch.ones(1, 2, 99, 16), torch.ones(1, 2, 99, 16)), torch.tensor([[101]])
    memory = Memory(held, FLOATS, places)
    memory.write([2], held)
    with pytest.raises(RuntimeError, match="not as it takes them"):
        memory.find(torch.ones(1, 2, 1, 1, 16), QueryBatch(places, seen, seen[0], 101))


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
def test_what_comes_from_a_page_that_is_partly_forgotten_is_in_the_order_of_time():
    sizes = CacheSizes(cache_size=60, num_sinks=4, memory=4096, num_recalled=16)
    places, rng = RecallPlaces(sizes, 8000, by_age=True, is_free=True), torch.Generator()
    held = KV(*(torch.randn(1, 2, 4250, 32, generator=rng.manual_seed(i)) for i in range(2)))
    memory = Memory(held, FLOATS, places)
    memory.write([sizes.num_sinks], held)
    assert memory.sketch.is_ordered.tolist() == [[True, False]]
    seen = torch.full((1, 9), 4250 + sizes.num_sinks)
    queries = torch.randn(1, 2, 1, 9, 32, generator=rng)
    found = memory.find(queries, QueryBatch(places, seen, seen[0, :1], int(seen.min())))
    assert found.visible.all() and (found.ages.diff() < 0).all() and (found.ages > 2202).any()


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
@pytest.mark.parametrize("num", [1, 5])
def test_our_kernel_takes_back_no_entry_that_is_not_a_number(num):
    sizes = CacheSizes(cache_size=20, num_sinks=4, memory=8000, num_recalled=5)
    rng = torch.Generator().manual_seed(0)
    held = KV(*(torch.randn(1, 2, 928, 16, generator=rng) for _ in range(2)))  # all slots
    held.keys[:, :, -64:] = torch.nan
    places = RecallPlaces(sizes, 8000, by_age=True, is_free=True)
    memory = Memory(held, FLOATS, places)
    memory.write([sizes.num_sinks], held)
    seen = torch.full((1, num), 928 + sizes.num_sinks)
    queries = torch.randn(1, 2, 1, num, 16, generator=rng)
    found = memory.find(queries, QueryBatch(places, seen, seen[0, :1], int(seen.min())))
    assert memory.sketch is not None and found.visible.all() and found.entries.keys.isfinite().all()


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
def test_our_kernel_sees_what_pytorch_sees(ids, monkeypatch):
    """Of rows of unequal lengths, too."""
    model, uses = tiny_model("llama", vocab_size=VOCAB, head_dim=16), []
    attend = kernel.attend

    def noticed(*tensors, **others):
        uses.extend([tensors] if others.get("beside") else [])
        return attend(*tensors, **others)

    monkeypatch.setattr(kernel, "attend", noticed)
    one = new(model, recall_layers="0:-1.5,1")

    def logits():
        rows = [one.new(), one.new()]
        for row, length, own in zip(rows, (40, 13), ids[:, None], strict=True):
            stepped(row, own[:, :length])
        method, others = rows[0], ids[:, 40:90]
        method.join(rows[1:])
        uses.clear()
        return stepped(method, others)

    found, num_uses = logits(), len(uses)
    assert num_uses == 2 * 50  # while the shorter row has lost nothing, too
    monkeypatch.setattr(kernel, "attends", lambda *_: False)
    assert torch.allclose(found, logits(), atol=1e-4) and not uses


@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
@pytest.mark.parametrize("recall_places", ["age", "rank"])
@pytest.mark.parametrize("way", ["rotation", "table", "table and rotation"])
@torch.no_grad()
def test_our_kernel_attends_to_what_it_finds_as_pytorch_does(
    ids, monkeypatch, way, recall_places, cache_dtype
):
    """For tokens of a segment, of rows of unequal lengths, and with tables that change."""
    if way == "table":
        model = tiny_model("gpt2", vocab_size=VOCAB, n_embd=32, n_head=2)
    else:
        model = tiny_model("llama", vocab_size=VOCAB, head_dim=16)
    most, see = [], Memory.see

    def compared(self, queries, batch, placing):
        memories = (x.cache.memory for x in (one, other))
        ((layer, recall),) = (
            (i, own.recall) for own in memories for i, x in own.of.items() if x is self
        )
        found, rotated = see(self, queries, batch, placing), recall.rotate_queries(queries, batch)
        matches = self.find(rotated, batch)
        assert matches.visible.any()
        for x, y in zip(found, recall.as_seen(layer, rotated, batch, matches), strict=True):
            assert_close(x, y, rtol=1e-4, atol=1e-4)
        most.append(queries.shape[3])
        return found

    monkeypatch.setattr(Memory, "see", compared)
    changes = dict(recall_places=recall_places, cache_dtype=cache_dtype, recall_layers="0,1:-1.5")
    one, other = (new(model, way, **changes) for _ in range(2))
    one.feed(ids[:1, :20])
    one.feed_segment(ids[:1, 20:90])
    stepped(other, ids[1:, :40])
    one.join([other])
    stepped(one, ids[:, 90:120])
    if (aligner := one.cache.memory.recall.placer.aligner) is not None:  # other tables from now on
        aligner.key.data = -aligner.key.data
        stepped(one, ids[:, 120:123])
    assert max(most) > 1 and min(most) == 1


def test_a_saved_stream_goes_on(ids):
    model = tiny_model("llama", vocab_size=VOCAB, head_dim=16)  # for which the kernel searches
    expected = stepped(new(model), ids)
    before = new(model)
    before.feed(ids[:, :30])
    before.feed(ids[:, 30:110])
    after = new(model)
    after.restore(before.state())
    for i, one in after.cache.memory.of.items():
        other = before.cache.memory.of[i]
        pairs = zip(one.entries, other.entries, strict=True)
        assert all(torch.equal(x[:, :, :108], y[:, :, :108]) for x, y in pairs)
        if one.sketch is not None:  # it estimates the same scores
            sketches = one.sketch, other.sketch
            numbers = [x.numbers[:, :, : 108 // BLOCK] for x in sketches]
            assert torch.equal(*numbers) and numbers[0].any()
    for i in range(110, NUM):
        assert torch.allclose(after.feed(ids[:, i : i + 1]), expected[:, i], atol=1e-4)
    with pytest.raises(UserError, match=r"a stream's 1.memory.1 must be"):
        after.restore({k: v for k, v in before.state().items() if k != "1.memory.1"})
    assert torch.allclose(stepped(after, ids), expected, atol=1e-4)  # it has forgotten all


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="of Linux")
@pytest.mark.parametrize("in_ram", [1.0, 0.0])
def test_large_memories_lie_in_mappings_of_their_own(in_ram, ids, tmp_path, monkeypatch, caplog):
    """In the machine's memory or on its disk; what a stream gives is the same."""
    model = tiny_model("llama", vocab_size=VOCAB, head_dim=16)
    usual = new(model)
    expected, state = stepped(usual, ids), usual.state()
    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path))
    monkeypatch.setattr(slots, "LARGE", 1)
    monkeypatch.setattr(slots, "IN_RAM", in_ram)
    monkeypatch.setattr(slots, "_in_ram", WeakSet())
    method = new(model)
    assert torch.equal(stepped(method, ids), expected)
    assert all(torch.equal(x, state[name]) for name, x in method.state().items())
    assert [path.name for path in tmp_path.rglob("*")] == ([] if in_ram else ["memories"])
    memory = next(iter(method.cache.memory.of.values()))
    assert all(slots.is_on_disk(x) != bool(in_ram) for x in memory.entries)
    assert not any(slots.is_on_disk(x) for x in memory.sketch.tensors)
    said = [x.endswith(f"lies on the disk, in {tmp_path / 'memories'}") for x in caplog.messages]
    assert sum(said) == (not in_ram)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    if not in_ram:
        with pytest.raises(UserError, match=r"a memory needs .* which has 0 bytes left"):
            new(model).feed(ids[:, :30])


@torch.no_grad()
def test_a_loop_of_ones_own_feeds_single_tokens(large, ids):
    """Once the cache is full; what is refused changes nothing."""
    model = large["llama"]
    cache = make_cache(model, method="streaming-llm", **SIZES)
    model(input_ids=ids[:, :17], past_key_values=cache)
    with pytest.raises(UserError, match="takes one token at a time, got 2"):
        model(input_ids=ids[:, 17:19], past_key_values=cache)
    found = [model(input_ids=ids[:, i : i + 1], past_key_values=cache) for i in range(17, 40)]
    expected = stepped(new(model), ids[:, :40])[:, -1]
    assert torch.allclose(found[-1].logits[:, -1], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bloom", {}, "memory does not work with .*: bloom models do not expose"),
        ("gpt2", {}, "memory needs an aligner on"),
        ("llama", dict(policy="h2o"), "memory needs policy oldest"),
    ],
)
def test_what_does_not_go_together(kind, changes, message, models):
    with pytest.raises(UserError, match=message):
        make_method("streaming-llm", models[kind], warn=False, **SIZES | changes)


@pytest.mark.parametrize("places", ["age", "rank"])
def test_recalling_all_is_dense_attention(places, monkeypatch):
    """All that a memory of so few tokens holds: what attends to the C + 1 newest entries is
    transformers' own sliding window. Places by age are true distances there.
    """
    model = tiny_model("mistral", sliding_window=None, vocab_size=VOCAB)
    banded = tiny_model("mistral", sliding_window=17, vocab_size=VOCAB)
    sizes = dict(cache_size=16, num_sinks=0, memory=8, num_recalled=8, recall_places=places)
    monkeypatch.setattr(recall_places, f"ALIKE_BY_{places.upper()}", 2)  # none says anything again
    ids = torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(5))[None, :64] + 2
    expected = banded(input_ids=ids, use_cache=False).logits[0]
    method = make_method("streaming-llm", model, warn=False, **sizes)
    steps = torch.stack([method.feed(ids[:, i : i + 1])[0] for i in range(64)])
    assert torch.allclose(steps, expected, atol=1e-4)
