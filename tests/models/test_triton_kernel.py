"""Our kernel in Triton is the reference, in its interpreter. By hand, where Triton (of 300 MB) is:

TRITON_INTERPRET=1 pytest tests/models/test_triton_kernel.py
"""

import os

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import VOCAB, tiny_model
from torch.testing import assert_close

from kvalign.aligners.table import Tables
from kvalign.cache.attention import Recalled, placed_attention
from kvalign.methods import make_method
from kvalign.models import kernel

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("it is run by hand, with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="no Triton, which PyTorch for CUDA brings")


@pytest.mark.parametrize("has_tables", [False, True])
@pytest.mark.parametrize("has_recalled", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "dim", "dtype", "num_sinks"),
    [(1, 64, torch.float32, 0), (2, 80, torch.bfloat16, 4), (3, 16, torch.float16, 2)],
)
def test_it_is_the_reference(has_tables, has_recalled, num_rows, dim, dtype, num_sinks):
    from kvalign.models.triton_kernel import attend

    rng = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=rng)

    ring = [random(num_rows, 3, 150, dim).to(dtype)[:, :, :137] for _ in range(2)]
    query, asking = random(2, num_rows, 6, 1, dim).unbind()
    places = torch.arange(137)[None].repeat(num_rows, 1)
    places[:, num_sinks:] = num_sinks + torch.randperm(300, generator=rng)[: 137 - num_sinks]
    hidden = torch.rand(num_rows, 137, generator=rng) < 0.2
    hidden[0, :70] = num_rows > 1  # a block and more of a row that is shorter
    places = places.masked_fill(hidden, -1)
    own = of_entries = recalled = beside = None
    if has_tables:
        scales = (torch.rand(3, 400, generator=rng) + 0.5 for _ in range(2))
        own = Tables(random(3, 400, dim), random(3, 400, dim), *scales)
        of_entries = own.of_entries(places[:, None], num_sinks)
    if has_recalled:
        recalled = Recalled(random(num_rows, 3, 2, 1, dim), random(num_rows, 3, 2, 1))
        beside = recalled.output.flatten(1, 3), recalled.log_sum.flatten(1)
    asked = dict(asking=asking, num_sinks=num_sinks)
    expected, _ = placed_attention(
        places[:, None], query, *ring, 0.2, tables=of_entries, recalled=recalled, **asked
    )
    given = dict(tables=own, beside=beside, **asked)
    found, log_sum = attend(places, query, *ring, 0.2, **given)
    assert_close(found, expected)
    assert log_sum.isfinite().all()


@pytest.mark.parametrize("memory", [0, 200])
def test_a_stream_that_it_reads_is_that_of_the_reference(memory, monkeypatch):
    model, logits = tiny_model("gpt2"), []
    ids = torch.randint(VOCAB, (2, 90), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(kernel, "attends", lambda *args: False)
    for takes in (False, True):
        monkeypatch.setattr(kernel, "takes_triton", lambda query, takes=takes: takes)
        options = dict(cache_size=20, num_sinks=2, memory=memory, aligner=tables(model, 0.3))
        method = make_method("kvalign", model, warn=False, **options)
        method.feed(ids[:, :70])
        logits.append([method.feed(token) for token in ids[:, 70:].split(1, 1)])
    assert_close(logits[0], logits[1])
