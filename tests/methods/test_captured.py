"""Captured steps: a decode step is one function of tensors. Recorded once, it runs without Python,
over laps of the ring and frames, while only its inputs change in place.

Here `make_fx` records them; on CUDA a graph does (`make test-gpu`).
"""

import copy

import pytest
import torch
from helpers.comings import come_and_go
from helpers.methods import make, tables
from helpers.tiny_models import tiny_model
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvalign.methods import stepper
from kvalign.models.attention import install
from kvalign.steppers.captured import NOT_RECORDED, Captured, Graph, not_captured
from kvalign.steppers.compiled import Compiled
from kvalign.steppers.regions import Regions

LONG, SHORT = 600, 130
"""Steps: over many frames and laps, and over three frames and six laps."""

KINDS = {
    "rotary": ("llama", "streaming-llm", None, {}),
    "rotary window": ("llama", "window", None, {}),
    "learned with tables": ("gpt2", "kvalign", tables, {}),
    "rotary with tables": ("llama", "kvalign", tables, {}),
    "int8": ("llama", "streaming-llm", None, {"cache_dtype": "int8"}),
    "several evicted": ("llama", "streaming-llm", None, {"num_evicted": 3}),
    "rotary, several rows": ("llama", "streaming-llm", None, {}),
}
FAST = ("rotary", "learned with tables")


class Recorder:
    """Records steps on a CPU; `num` counts them, `num_made` the steps that were made of these."""

    def __init__(self):
        self.num = self.num_made = 0

    def __call__(self, run, inputs, pool):
        self.num += 1
        graph = make_fx(run)(inputs)

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
    model = tiny_model(model_kind)
    if make_aligner is not None:
        sizes = sizes | {"aligner": make_aligner(model, 0.3)}
    return name, model, sizes


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in KINDS]
)
@torch.no_grad()
def test_a_step_that_was_recorded_once_is_every_step(kind):
    """To the last digit, from a cache that the prompt has filled on."""
    num_steps = LONG if kind in FAST else SHORT
    (eager, found), recorder, num_shapes = side_by_side(kind, num_first=30, num_steps=num_steps)
    assert all(map(torch.equal, found, eager))
    assert recorder.num == num_shapes
    assert recorder.num_made == num_steps - num_shapes


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in KINDS]
)
@torch.no_grad()
def test_a_cache_that_fills_is_captured(kind):
    """Its slots without an entry are hidden."""
    (eager, found), recorder, _ = side_by_side(kind, num_first=6, num_steps=40)
    torch.testing.assert_close(torch.stack(found), torch.stack(eager), atol=1e-4, rtol=1e-4)
    assert recorder.num_made >= 40 - 2 * recorder.num
    assert recorder.num == 2


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
def test_rows_that_come_and_go_are_those_alone():
    """Each number of rows has a step of its own; rows of other lengths hide slots."""
    method, recorder = captured("streaming-llm", tiny_model("llama"))
    come_and_go(method, (6, 3, 17, 9), (0, 2), num_steps=60, leave=12, join=30)
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


def test_a_mask_of_the_tokens_so_far_is_not_one_of_slots():
    """OPT of transformers before 5.23 made one of its own."""
    install(model := tiny_model("opt").config)
    mask = ALL_MASK_ATTENTION_FUNCTIONS[model._attn_implementation]
    given = dict(q_length=1, kv_length=17, kv_offset=-10)
    assert mask(**given, attention_mask=torch.ones(1, 7).bool()) is None


def test_what_differs_at_each_step_is_not_recorded():
    """Rows of unequal length with tables: each has its own places."""
    _, model, sizes = of_kind("learned with tables")
    plain, (method, recorder) = make("kvalign", model, **sizes), captured("kvalign", model, **sizes)
    for one in (plain, method):
        rows = [one.new() for _ in range(2)]
        for row, num in zip(rows, (5, 30), strict=True):
            row.feed(torch.arange(num)[None])
        one.join(rows)
    for i in range(8):
        token = torch.tensor([[i], [i + 1]])
        assert torch.equal(method.feed(token), plain.feed(token))
    assert recorder.num == 0


@pytest.mark.parametrize(
    ("kind", "name", "sizes", "why"),
    [
        ("llama", "streaming-llm", {"memory": 8, "num_recalled": 2}, "a memory"),
        ("llama", "streaming-llm", {"policy": "h2o"}, "policy h2o"),
        ("bloom", "streaming-llm", {}, "order of entries"),
        ("llama", "streaming-llm", {}, None),
        ("gpt2", "streaming-llm", {}, None),
    ],
    ids=str,
)
def test_a_line_says_why_steps_are_not_captured(kind, name, sizes, why):
    found = not_captured(make(name, tiny_model(kind), **sizes))
    assert found is None if why is None else why in found


def test_the_first_stepper_that_is_ready_is_taken(monkeypatch):
    """And its caches have the shapes of full ones from the first token on."""
    method = make("streaming-llm", tiny_model("llama"))
    assert next(iter(stepper.STEPPERS)) == "captured"
    assert Captured.ready(method) is None  # on a CPU
    monkeypatch.setattr(Captured, "ready", classmethod(lambda cls, method: cls(method.model)))
    assert method.take_ready_stepper().steps_in_a_word == "captured"
    assert method.cache.is_static


def test_what_is_not_captured_is_compiled_where_that_was_asked_for():
    """With a memory, say."""
    model = tiny_model("llama")
    stepper = Captured.compiling(make("streaming-llm", model))
    assert stepper.word_for(1) == "compiled and captured"
    memory = make("streaming-llm", model, memory=8, num_recalled=2)
    assert isinstance(Captured.compiling(memory), Compiled)


class RegionsCalled(Recorder):
    """Records nothing: each step is a call of the model with its compiled regions."""

    def __init__(self, regions):
        super().__init__()
        self.regions = regions

    def __call__(self, run, inputs, pool):
        self.num += 1

        def replay():
            self.num_made += 1
            with self.regions.called():
                return run(inputs)

        return Graph(inputs, replay)


@pytest.mark.parametrize(
    "kind",
    ["learned with tables", *(pytest.param(x, marks=pytest.mark.slow) for x in ("rotary", "int8"))],
)
@torch.no_grad()
def test_regions_of_the_model_are_compiled(kind):
    """Steps with them are those without, and the model is as it was afterwards."""
    name, model, sizes = of_kind(kind)
    before = [*model.modules()], [vars(one).get("forward") for one in model.modules()]
    method, regions = make(name, model, **sizes), Regions(model)
    method.stepper = Captured(model, regions, recorder := RegionsCalled(regions))
    method.reset()
    eager = make(name, model, **sizes)
    torch._dynamo.reset()
    counters.clear()
    for ids in torch.randint(5, 90, (1, 45)).split([30] + 15 * [1], 1):
        torch.testing.assert_close(method.feed(ids), eager.feed(ids), atol=1e-4, rtol=1e-4)
    assert recorder.num == 1 and recorder.num_made == 14
    assert counters["stats"]["unique_graphs"] > 4
    assert before == ([*model.modules()], [vars(one).get("forward") for one in model.modules()])


def test_a_module_with_a_forward_of_its_own_is_not_compiled():
    """accelerate, say, gives one to modules that lie on several devices."""
    model = tiny_model("llama")
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].input_layernorm
    own = mlp.forward = lambda x: x
    with Regions(model).called():
        assert mlp.forward is own and "forward" in vars(norm)
    assert mlp.forward is own and "forward" not in vars(norm)
