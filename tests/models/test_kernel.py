"""The C++ file that this machine's compiler builds: once, and none where it cannot."""

import copy
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import tiny_model
from torch._inductor.exc import InvalidCxxCompiler
from torch.testing import assert_close

from kvalign.aligners.entries import KV
from kvalign.aligners.table import Tables, standardised
from kvalign.cache.int8 import Int8
from kvalign.cache.layer import Form
from kvalign.cache.passes import HOST
from kvalign.cache.sizes import CacheSizes
from kvalign.memory.memory import Memory
from kvalign.memory.recall import QueryBatch
from kvalign.memory.recall_places import RecallPlaces
from kvalign.methods import make_method
from kvalign.models import kernel, packed
from kvalign.models.rope import Angles, Rotation

needs_kernel = pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")


@pytest.fixture
def anew(tmp_path, monkeypatch):
    """As a process that has not asked yet, and what it loads; another library is none of ours."""
    loaded = []
    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel.ctypes, "CDLL", loaded.append)
    kernel.load.cache_clear()
    yield loaded
    monkeypatch.undo()
    kernel.load.cache_clear()
    kernel.is_here()


@pytest.mark.slow
@needs_kernel
def test_it_is_built_once_and_again_where_it_is_damaged(anew, tmp_path, monkeypatch):
    (source := tmp_path / "short.cpp").touch()  # what is built for all other tests takes long
    monkeypatch.setattr(kernel, "SOURCES", [source])
    assert kernel.is_here()
    (file,) = tmp_path.glob("kernels/*.so")
    whole, built = file.read_bytes(), []
    monkeypatch.setattr(
        kernel, "_build", lambda file, needed: built.append(file) or file.write_bytes(whole)
    )
    for harm in (lambda: None, lambda: file.write_bytes(whole[:-9]), lambda: file.unlink()):
        harm()
        kernel.load.cache_clear()
        assert kernel.is_here()
    assert built == [file, file] and anew == [str(file)] * 4
    assert not [*tmp_path.glob("kernels/*.partial*")]


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("missing", ["compiler", "header"])
def test_without_a_compiler_a_line_says_so_and_kernels_are_those_of_pytorch(
    missing, anew, monkeypatch, caplog
):
    def none():
        raise InvalidCxxCompiler

    if missing == "compiler":
        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    else:
        monkeypatch.setattr(kernel, "_FLAGS", ("-nostdinc", "-nostdinc++"))
    model = copy.deepcopy(tiny_model("llama"))
    with caplog.at_level(logging.INFO):
        packed.pack(model, "int4")
        packed.pack(copy.deepcopy(tiny_model("llama")), "int4")
    said = [x.message.split(":")[0] for x in caplog.records if "kernels" in x.message]
    assert said == ["steps use PyTorch's own kernels"]
    assert type(model.model.layers[0].mlp.up_proj) is packed.TorchLinear and not anew


@needs_kernel
@pytest.mark.parametrize(("head_dim", "rotates"), [(16, True), (80, True), (64, False)])
def test_our_attention_says_what_its_exponentials_add_up_to(head_dim, rotates):
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 1, head_dim, generator=rng)
    keys, values = (torch.randn(6, 1, 21, head_dim, generator=rng) for _ in range(2))
    hidden = torch.rand(6, 21, generator=rng) < 0.2
    hidden[0] = True
    at, angles, placed = torch.zeros_like(hidden, dtype=torch.int64), None, keys
    if rotates:
        rotation = Rotation(1 / 100 ** torch.linspace(0, 1, 8))
        angles = torch.stack(rotation.angles(torch.arange(50))[:2])[None]
        at = torch.randint(50, (6, 21), generator=rng)
        placed = rotation.shift(keys, at[:, None])
    of_slots = at.masked_fill(hidden, -1), query, keys, values, 0.5
    found, log_sum = kernel.attend(*of_slots, angles=angles)
    scores = query[:, :, 0] @ placed[:, 0].mT * 0.5
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    assert_close(log_sum, scores.logsumexp(-1))
    assert_close(found[:, 0], scores.softmax(-1).nan_to_num(0.0) @ values[:, 0])


@needs_kernel
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.float32), (80, torch.bfloat16)])
def test_our_attention_reads_tables_as_a_softmax_over_placed_entries_does(head_dim, dtype):
    rng = torch.Generator().manual_seed(0)
    ring = [torch.randn(2, 3, 40, head_dim, generator=rng).to(dtype)[:, :, :37] for _ in range(2)]
    means = [torch.randn(3, 50, head_dim, generator=rng) for _ in range(2)]
    scales = [torch.rand(3, 50, generator=rng) + 0.5 for _ in range(2)]
    query, asking = torch.randn(2, 2, 6, 1, head_dim, generator=rng).unbind()
    places = torch.stack([torch.randperm(50, generator=rng)[:37] for _ in range(2)])
    places = places.masked_fill(torch.rand(2, 37, generator=rng) < 0.2, -1)
    for at in (places, places[:1]):
        rows = at.clamp_min(0).expand(2, -1)
        is_sink, hidden = (rows < 4)[:, None], (at < 0)[:, None, None]
        mean_keys, mean_values = (x[:, rows].transpose(0, 1) for x in means)
        mean_keys, mean_values = (
            x.masked_fill(is_sink[..., None], 0) for x in (mean_keys, mean_values)
        )
        key_scales, value_scales = (
            x[:, rows].transpose(0, 1).masked_fill(is_sink, 1) for x in scales
        )
        stored = query.unflatten(1, (3, 2))[:, :, :, 0] @ ring[0].float().mT
        scores = stored * key_scales[:, :, None]
        scores = scores + asking.unflatten(1, (3, 2))[:, :, :, 0] @ mean_keys.mT
        weights = (scores / 4).masked_fill(hidden, -torch.inf).softmax(-1)
        expected = weights @ (mean_values + value_scales[..., None] * ring[1].float())
        with torch.no_grad():
            of_tables = dict(tables=[*means, *scales], asking=asking, num_sinks=4)
            found, _ = kernel.attend(at, query, *ring, 1 / 4, **of_tables)
        assert_close(found, expected.flatten(1, 2)[:, None])


@needs_kernel
@pytest.mark.parametrize("num_hidden", [0, 48])
def test_our_kernel_writes_entries_without_their_places_and_corrected(num_hidden):
    rng = torch.Generator().manual_seed(0)
    ring = [torch.zeros(2, 3, 9, 16) for _ in range(2)]
    new = torch.randn(2, 1, 6, 16, generator=rng).transpose(1, 2).chunk(2, dim=1)
    means = [torch.randn(3, 50, 16, generator=rng) for _ in range(2)]
    scales = [torch.rand(3, 50, generator=rng) + 0.5 for _ in range(2)]
    places = torch.tensor([7, 31])
    rows = [
        (x[:, places].transpose(0, 1), s[:, places].T) for x, s in zip(means, scales, strict=True)
    ]
    expected = [
        (x - m[:, :, None]) / s[..., None, None] for x, (m, s) in zip(new, rows, strict=True)
    ]
    network = ()
    if num_hidden:
        network = [
            torch.randn(num_hidden, 96, generator=rng),
            torch.randn(num_hidden, generator=rng),
        ]
        for _ in range(2):
            network += [torch.randn(48, num_hidden, generator=rng), torch.randn(48, generator=rng)]
        both = torch.cat([x.flatten(1) for x in expected], 1)
        hidden = torch.nn.functional.linear(both, *network[:2]).relu()
        added = [torch.nn.functional.linear(hidden, *network[i : i + 2]) for i in (2, 4)]
        expected = [x + y.unflatten(1, (3, 1, 16)) for x, y in zip(expected, added, strict=True)]
    of_query = torch.arange(9)[None], torch.zeros(2, 3, 1, 16), *ring, 1.0
    of_new = dict(tables=[*means, *scales], network=network)
    kernel.attend(*of_query, new=(torch.tensor([5]), *new, places), **of_new)
    for slot, at in ((9, places), (5, places + 30), (5, places - 8)):
        with pytest.raises(RuntimeError, match="not as it takes them"):
            kernel.attend(*of_query, new=(torch.tensor([slot]), *new, at), **of_new)
    for x, y in zip(ring, expected, strict=True):
        assert_close(x[:, :, 5:6], y)
        assert x[:, :, :5].count_nonzero() == x[:, :, 6:].count_nonzero() == 0


@needs_kernel
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("way", ["plain", "table", "rotation", "rotation and base"])
def test_our_kernel_writes_8_bits_as_pytorch_encodes_them(way, head_dim):
    rng = torch.Generator().manual_seed(0)
    of_sizes = 10.0 ** torch.arange(-3, 3)[:, None, None]
    new = KV(*torch.randn(2, 64, 6, 1, head_dim, generator=rng) * of_sizes)
    new.keys[0, 0] = 0
    places, form = torch.randint(500, (64,), generator=rng), Int8(torch.float32)
    of_places, angles, expected = None, None, new
    if way == "table":
        of_places = [torch.randn(6, 512, head_dim, generator=rng) for _ in range(2)]
        of_places += [torch.rand(6, 512, generator=rng) + 0.5 for _ in range(2)]
        rows = Tables(*(x[:, places].transpose(0, 1)[:, :, None] for x in of_places))
        expected = standardised(*new, rows)
    if "rotation" in way:
        rotation = Rotation(1 / 1e4 ** torch.linspace(0, 1, 8))
        angles = torch.stack(rotation.angles_to(slice(0, 512), HOST)[:2])[None]
        form = replace(form, rotation=rotation)
    if "base" in way:
        form = replace(form, base=torch.randn(6, 1, head_dim, generator=rng))
    ring = [torch.zeros(64, 6, 9, head_dim + 4, dtype=torch.int8) for _ in range(2)]
    query = torch.randn(64, 6, 1, head_dim, generator=rng)
    of_keys = dict(angles=angles, bases=form.bases, tables=of_places)
    of_query = torch.arange(9)[None], query, *ring, 0.2
    found, _ = kernel.attend(*of_query, **of_keys, new=(torch.tensor([5]), *new, places))
    for x, y in zip(ring, form.encode_at(expected, places[:, None, None]), strict=True):
        assert torch.equal(x[:, :, 5:6], y)
        assert x[:, :, :5].count_nonzero() == x[:, :, 6:].count_nonzero() == 0
    assert_close(found, kernel.attend(*of_query, **of_keys)[0], rtol=0, atol=0)


@needs_kernel
def test_a_search_refuses_tables_and_angles_that_do_not_fit():
    sizes = CacheSizes(cache_size=20, memory=300, num_recalled=5)
    rng = torch.Generator().manual_seed(0)
    held = KV(*(torch.randn(1, 2, 200, 16, generator=rng) for _ in range(2)))
    places = RecallPlaces(sizes, 900, by_age=True, is_free=False)
    memory = Memory(held, Form(torch.float32), places)
    memory.write([0], held)
    queries, seen = torch.randn(1, 2, 1, 1, 16, generator=rng), torch.tensor([[200]])
    tables = [torch.zeros(2, 100, 16)] * 2 + [torch.ones(2, 100)] * 2
    for is_fit, changes in (
        *((True, {}), (False, dict(first=96)), (False, dict(now=torch.tensor([[130]])))),
        *((False, dict(far=torch.zeros(100))), (False, dict(age_bias=torch.zeros(100)))),
        (False, dict(angles=torch.zeros(1, 2, 4, 8))),
    ):
        asking = QueryBatch(places, seen, seen[0], 200)
        placing = kernel.Placing(**{"tables": tables, "first": 95} | changes)
        with nullcontext() if is_fit else pytest.raises(RuntimeError, match="not as it takes them"):
            memory.see(queries, asking, placing)
    asking = QueryBatch(places, seen, seen[0], 200, angles=Angles(*torch.ones(2, 3, 1, 8)))
    with pytest.raises(RuntimeError, match="not as it takes them"):  # of three rows
        memory.see(queries, asking, kernel.Placing())


@needs_kernel
@pytest.mark.parametrize(("head_dim", "num_pairs"), [(16, 8), (80, 16), (64, 32)])
def test_a_search_rotates_its_queries(head_dim, num_pairs):
    """By angles of each token and row, of all their numbers or the first."""
    sizes = CacheSizes(cache_size=20, memory=300, num_recalled=5)
    rng = torch.Generator().manual_seed(0)
    held = KV(*(torch.randn(2, 2, 200, head_dim, generator=rng) for _ in range(2)))
    places = RecallPlaces(sizes, 900, by_age=False, is_free=True)
    memory = Memory(held, Form(torch.float32), places)
    memory.write([0, 0], held)
    queries = torch.randn(2, 2, 3, 4, head_dim, generator=rng)
    seen = torch.arange(197, 201).expand(2, 4)
    positions = torch.tensor([[3.0], [50.0]]) + torch.arange(4)
    angles = Rotation(1 / 100 ** torch.linspace(0, 1, num_pairs)).angles(positions[:, None, None])
    found, expected = (
        memory.see(x, QueryBatch(places, seen, seen[:, -1], 197, angles=y), kernel.Placing())
        for x, y in ((queries, angles), (angles.rotate(queries), None))
    )
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@needs_kernel
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(16, torch.float32), (80, torch.bfloat16), (64, torch.float16)]
)
def test_our_attention_beside_another_is_one_attention(head_dim, dtype):
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 1, head_dim, generator=rng)
    held = [torch.randn(2, 3, 28, head_dim, generator=rng).to(dtype) for _ in range(2)]
    places = torch.arange(28).expand(2, -1).masked_fill(torch.arange(28) % 5 == 1, -1)
    places[1, 21:] = -1  # of the second row the other attention sees nothing
    first, last = ((x.contiguous(), query) for x in places.split([21, 7], 1))
    output, log_sum = kernel.attend(*last, *(x[:, :, 21:] for x in held), 0.2)
    beside, own = (output[:, 0], log_sum), (*first, *(x[:, :, :21] for x in held))
    expected, _ = kernel.attend(places, query, *held, 0.2)
    assert_close(kernel.attend(*own, 0.2, beside=beside)[0], expected)


def test_where_our_kernel_for_cuda_fails_pytorch_attends_and_a_line_says_so(monkeypatch, caplog):
    model, asked, logits = tiny_model("gpt2"), [], []

    def fail(*args, **kwargs):
        asked.append(1)
        raise RuntimeError("no such card")

    monkeypatch.setattr(kernel, "_triton_kernel", lambda: SimpleNamespace(attend=fail))
    monkeypatch.setattr(kernel, "_unfit", set())
    for takes in (lambda x: x.device not in kernel._unfit, lambda x: False):
        monkeypatch.setattr(kernel, "takes_triton", takes)
        monkeypatch.setattr(kernel, "attends", lambda *args: False)
        method = make_method("kvalign", model, cache_size=9, warn=False, aligner=tables(model, 0.3))
        logits.append([method.feed(torch.tensor([[i]])) for i in range(20)])
    assert_close(logits[0], logits[1], rtol=0, atol=0)
    said = [x.message for x in caplog.records if x.name.startswith("kvalign")]
    assert len(asked) == len(said) == 1 and said[0].endswith("our own failed: no such card")


@needs_kernel
@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="AVX2 is all that this CPU has"
)
def test_with_avx2_alone_they_are_as_exact():
    """In a process whose limit is AVX2."""
    tests = ["models/test_packed.py", "cache/test_memory.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += ["-k", "our_ or test_memory"]  # what our kernels do
    command += [str(Path(__file__).parents[1] / name) for name in tests]
    env = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout[-2000:]
