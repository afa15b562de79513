"""Captured steps: a decode step is one function of tensors. Recorded once, it runs without Python,
over laps of the ring and frames, while only its inputs change in place.

Here a `Tape` records them; on CUDA a graph does (`make test-gpu`).
"""

import copy

import pytest
import torch
from helpers.comings import come_and_go
from helpers.methods import make, network, tables
from helpers.other_device import NAME, moved, recording
from helpers.tiny_models import tiny_model
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvalign.memory import memories
from kvalign.memory.memories import Memories
from kvalign.memory.memory import Memory
from kvalign.steppers.captured import NOT_RECORDED, ON_HOST, Captured, Graph, Regions

NUM_STEPS, RUN = 70, 20
"""Over three frames, of so many positions, and six laps."""

MEMORY = {"memory": 12}
KINDS = {
    "rotary": ("llama", "streaming-llm", None, {}),
    "rotary window": ("llama", "window", None, {}),
    "learned with tables": ("gpt2", "kvalign", tables, {}),
    "rotary with tables": ("llama", "kvalign", tables, {}),
    "a network that moves entries": ("gpt2", "kvalign", network, {}),
    "int8": ("llama", "streaming-llm", None, {"cache_dtype": "int8"}),
    "several evicted": ("llama", "streaming-llm", None, {"num_evicted": 3}),
    "rotary, several rows": ("llama", "streaming-llm", None, {}),
    "memory": ("llama", "streaming-llm", None, MEMORY),
    "memory of 8 bits": ("llama", "streaming-llm", None, MEMORY | {"cache_dtype": "int8"}),
    "memory by rank": ("gpt2", "kvalign", tables, MEMORY),
    "memory by age": ("gpt2", "kvalign", tables, MEMORY | {"recall_places": "age"}),
    "memory with tables": ("llama", "kvalign", tables, MEMORY),
    "memory of several rows": ("llama", "streaming-llm", None, MEMORY),
}
FULL = [kind for kind in KINDS if "memory" not in kind]
FILLING = [kind for kind in KINDS if kind not in ("rotary window", "rotary with tables")]
FAST = ("rotary", "learned with tables", "a network that moves entries", "memory")


class Tape(TorchDispatchMode):
    """Operations on tensors as they are run, to be run again; none may read a number."""

    def __init__(self, run, inputs):
        super().__init__()
        self.ops = []
        with self:
            self.result = run(inputs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.Tag.data_dependent_output not in func.tags, func
        self.ops.append((func, args, kwargs or {}, func(*args, **kwargs or {})))
        return self.ops[-1][-1]

    def __call__(self, _):
        now = {}
        for func, *given, out in self.ops:
            args, kwargs = tree_map_only(torch.Tensor, lambda x, now=now: now.get(id(x), x), given)
            now |= zip(map(id, tree_leaves(out)), tree_leaves(func(*args, **kwargs)), strict=True)
        return now[id(self.result)]


class Recorder:
    """Records steps on a CPU; `num` counts them, `num_made` the steps that were made of these."""

    def __init__(self, record=Tape):
        self.num, self.num_made, self.record = 0, 0, record

    def __call__(self, run, inputs, pool):
        self.num += 1
        graph = self.record(run, inputs)

        def replay():
            self.num_made += 1
            return graph(inputs)

        return Graph(inputs, replay)


def captured(name, model, **sizes):
    """A method with captured steps, and their recorder."""
    method, recorder = make(name, model, **sizes), Recorder()
    method.stepper = Captured(model, record=recorder)
    method.reset()
    return method, recorder


def of_kind(kind):
    model_kind, name, make_aligner, sizes = KINDS[kind]
    model, sizes = tiny_model(model_kind), {"cache_size": 12} | sizes
    if make_aligner is not None:
        sizes = sizes | {"aligner": make_aligner(model, 0.3)}
    return name, model, sizes


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in FULL]
)
@torch.no_grad()
def test_a_step_that_was_recorded_once_is_every_step(kind, monkeypatch):
    """To the last digit, from a cache that the prompt has filled on."""
    monkeypatch.setattr("kvalign.cache.realigner.LONG_RUN", RUN)
    (eager, found), recorder, num_shapes = side_by_side(kind, num_first=20, num_steps=NUM_STEPS)
    assert all(map(torch.equal, found, eager))
    assert recorder.num == num_shapes
    assert recorder.num_made == NUM_STEPS - num_shapes


@pytest.fixture
def memory_on_card(monkeypatch):
    """A memory of the CPU is taken for one of a card, which PyTorch searches."""
    monkeypatch.setattr(Memories, "is_on_card", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # a CPU else reads `visible`
    monkeypatch.setattr(Memory, "_new_sketch", lambda self: None)


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in FILLING]
)
@torch.no_grad()
def test_a_cache_that_fills_is_captured(kind, memory_on_card, monkeypatch):
    """Its slots without an entry are hidden; queries of a memory must find all they take back."""
    monkeypatch.setattr("kvalign.memory.memory.PART_LEN", 7)  # which is the spare room of slots
    (eager, found), recorder, _ = side_by_side(kind, 6, 54)
    torch.testing.assert_close(torch.stack(found), torch.stack(eager), atol=1e-4, rtol=1e-4)
    assert recorder.num == 2 and recorder.num_made >= (16 if "memory" in kind else 50)


@pytest.mark.parametrize("kind", [*FAST[:2], "memory by rank", "memory of 8 bits"])
@torch.no_grad()
def test_nothing_in_a_captured_step_waits_for_the_host(kind, monkeypatch):
    """On a device that refuses what a CUDA graph cannot record, while one is recorded."""
    monkeypatch.setattr(memories, "is_on_card", lambda device: device.type == NAME)
    name, here, sizes = of_kind(kind)
    eager, recorder = make(name, here, **sizes), Recorder(refusing)
    there = moved(copy.deepcopy(here))
    method = make(name, there, **of_kind(kind)[-1])
    method.stepper = Captured(there, record=recorder)
    method.reset()
    for ids in torch.randint(5, 90, (1, 52)).split([40] + 12 * [1], 1):
        found = method.feed(ids.to(NAME)).cpu()
        torch.testing.assert_close(found, eager.feed(ids), atol=1e-4, rtol=1e-4)
    assert recorder.num == 1 and recorder.num_made == 11


def refusing(run, inputs):
    """Refuses to record what cannot be; each step is made anew."""
    with recording():
        run(inputs)
    return run


def test_steps_of_a_memory_on_the_host_are_called(caplog):
    model = tiny_model("llama")
    method, recorder = captured("streaming-llm", model, **MEMORY)
    plain = make("streaming-llm", model, **MEMORY)
    for ids in torch.arange(5, 75)[None].split([60] + 10 * [1], 1):
        assert torch.equal(method.feed(ids), plain.feed(ids))
    assert recorder.num == 0 and method.steps_in_a_word is None
    assert [x for x in caplog.messages if "measured" not in x] == [ON_HOST]


def side_by_side(kind, num_first, num_steps):
    """Logits of steps that are called and captured, the recorder, and the shapes of a full cache,
    of which one that evicts several entries has several.
    """
    name, model, sizes = of_kind(kind)
    num_rows = 2 if "rows" in kind else 1
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (num_rows, num_first + num_steps), generator=rng)
    eager, (method, recorder) = make(name, model, **sizes), captured(name, model, **sizes)
    found = []
    for one in (eager, method):
        one.feed(ids[:, :num_first])
        found.append([one.feed(ids[:, i : i + 1]) for i in range(num_first, ids.shape[1])])
    return found, recorder, 2 if sizes.get("num_evicted") else 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, MEMORY], ids=["", "memory"])
@torch.no_grad()
def test_rows_that_come_and_go_are_those_alone(sizes, memory_on_card):
    """Each number of rows has a step of its own; rows of other lengths hide slots."""
    model = tiny_model("llama", num_hidden_layers=1)
    method, recorder = captured("streaming-llm", model, cache_size=12, **sizes)
    come_and_go(method, (6, 3, 17, 9), (0, 2), num_steps=24, leave=8, join=16)
    assert recorder.num >= 3 and recorder.num_made > 50


def test_a_changed_model_is_recorded_again():
    model = copy.deepcopy(tiny_model("llama"))
    plain, (method, recorder) = make("streaming-llm", model), captured("streaming-llm", model)
    for one in (plain, method):
        one.feed(torch.arange(30)[None])
    for i in range(12):
        if i == 6:
            model.model.layers[0].mlp.register_forward_hook(lambda *args: args[-1] * 0)
        token = torch.tensor([[i + 5]])
        assert torch.equal(method.feed(token), plain.feed(token))
    assert recorder.num == 2


def test_a_step_that_cannot_be_recorded_is_called(caplog):
    """A line says so, once; what was recorded before does not count."""

    def refuse(run, inputs, pool):
        run(inputs)
        raise RuntimeError("a number is read\nand more")

    model = tiny_model("llama")
    plain, (method, _) = make("streaming-llm", model), captured("streaming-llm", model)
    method.stepper.record = refuse
    for one in (plain, method):
        one.feed(torch.arange(30)[None])
    for i in range(8):
        token = torch.tensor([[i + 5]])
        assert torch.equal(method.feed(token), plain.feed(token))
    assert [x.message for x in caplog.records] == [f"{NOT_RECORDED}: a number is read"]
    assert method.steps_in_a_word is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["learned with tables", "int8"])
@torch.no_grad()
def test_regions_of_the_model_are_compiled(kind):
    """No step is recorded here, and the model is as it was afterwards."""
    (name, model, sizes), how = of_kind(kind), {} if kind == "int8" else {"backend": "eager"}
    before = [*model.modules()], [vars(one).get("forward") for one in model.modules()]
    method, regions = make(name, model, **sizes), Regions(model, **how)
    recorder = Recorder(lambda run, inputs: regions.called()(run))
    method.stepper = Captured(model, regions, recorder)
    method.reset()
    eager = make(name, model, **sizes)
    torch._dynamo.reset()
    counters.clear()
    for ids in torch.randint(5, 90, (1, 45)).split([30] + 15 * [1], 1):
        torch.testing.assert_close(method.feed(ids), eager.feed(ids), atol=1e-4, rtol=1e-4)
    assert recorder.num == 1 and recorder.num_made == 14
    assert counters["stats"]["unique_graphs"] > 4
    assert before == ([*model.modules()], [vars(one).get("forward") for one in model.modules()])
