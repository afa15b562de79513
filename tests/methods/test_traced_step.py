"""A decode step is one function of tensors: traced once, it runs without Python, over laps of the
ring and frames, while only its inputs change in place.
"""

from dataclasses import replace

import pytest
import torch
from helpers.methods import make, tables
from helpers.tiny_models import tiny_model
from torch.fx.experimental.proxy_tensor import make_fx

NUM_STEPS = 600

KINDS = {
    "rotary": ("llama", "streaming-llm", None, {}),
    "rotary window": ("llama", "window", None, {}),
    "learned, stale": ("gpt2", "streaming-llm", None, {}),
    "learned with tables": ("gpt2", "kvalign", tables, {}),
    "rotary with tables": ("llama", "kvalign", tables, {}),
    "int8": ("llama", "streaming-llm", None, {"cache_dtype": "int8"}),
    "int8 with tables": ("gpt2", "kvalign", tables, {"cache_dtype": "int8"}),
    "rotary, several rows": ("llama", "streaming-llm", None, {}),
}
SCALES = ("key_scales", "value_scales")
OF_DECODE = ("slot", "position_ids", "places", "order", "ranks", "all_at")


def inputs_of(ids, step):
    """The tensors of a step that change from one to the next."""
    decode = {name: getattr(step.decode, name) for name in OF_DECODE}
    tensors = {name: x for name, x in decode.items() if isinstance(x, torch.Tensor)}
    tensors |= dict(zip(SCALES, step.decode.scales or (), strict=False))
    return {"ids": ids, "behind_rows": step.behind_rows} | tensors


def traced(method, step, inputs):
    """Graph of the step that the cache is in."""

    def run(given):
        decode = {name: given[name] for name in OF_DECODE if name in given}
        if SCALES[0] in given:
            decode["scales"] = tuple(given[name] for name in SCALES)
        decode = replace(step.decode, at=given["position_ids"][:, None], **decode)
        method.cache.step = replace(step, behind_rows=given["behind_rows"], decode=decode)
        return method.forward(given["ids"], method.cache, position_ids=given["position_ids"])

    return make_fx(run)(inputs)


FAST = ("rotary", "learned with tables")


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in KINDS]
)
@torch.no_grad()
def test_a_step_that_was_traced_once_is_every_step(kind):
    model_kind, name, make_aligner, changes = KINDS[kind]
    model = tiny_model(model_kind)
    model.config.pad_token_id = None  # else transformers looks at the ids, to warn of padding
    if make_aligner is not None:
        changes = changes | {"aligner": make_aligner(model, 0.3)}
    num_rows = 2 if "rows" in kind else 1
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (num_rows, 50 + NUM_STEPS), generator=rng)
    eager, other = (make(name, model, **changes) for _ in range(2))
    for method in (eager, other):
        method.feed(ids[:, :50])
    graph = inputs = None
    for i in range(50, ids.shape[1]):
        expected, token = eager.feed(ids[:, i : i + 1]), ids[:, i : i + 1].clone()
        with other.cache.forward_pass(num_rows, 1) as step:
            now = inputs_of(token, step)
            if graph is None:
                inputs = {name: x.clone() for name, x in now.items()}
                graph = traced(other, step, inputs)
            assert now.keys() == inputs.keys()
            for held, x in zip(inputs.values(), now.values(), strict=True):
                held.copy_(x)
            found = graph(inputs)
        assert torch.equal(found, expected), i
    assert eager.cache.end > 20 * eager.sizes.cache_size
