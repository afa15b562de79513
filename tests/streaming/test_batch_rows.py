"""Rows of a batch take their tokens together: as each would alone, and with one question to the
device.
"""

import pytest
import torch
from helpers import other_device
from helpers.methods import made
from helpers.other_device import OtherTensor, moved
from helpers.tiny_models import VOCAB, tiny_model

from kvalign.foundation.errors import RunError
from kvalign.streaming.loop import Batch, Row, choose_all
from kvalign.streaming.sampling import Sampling

HOT = dict(temperature=1.5, top_k=12, top_p=0.9)


def rows_of(num, draws, **sampling):
    ids = torch.randint(2, VOCAB, (num, 9), generator=torch.Generator().manual_seed(3))
    drawing = [
        Sampling(seed=1, **sampling).of_row(torch.device("cpu"), i) | draws for i in range(num)
    ]
    return [Row(ids[i : i + 1], **drawing[i]) for i in range(num)]


@pytest.mark.parametrize("draws", [{}, {"draws": None}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [HOT, dict(do_sample=False), dict(repetition_penalty=1.3)])
def test_each_draws_as_it_would_alone_and_as_multinomial_does(sampling, dtype, draws):
    together, alone = (rows_of(5, draws, **sampling) for _ in range(2))
    generators = [torch.Generator().manual_seed(1 + i) for i in range(5)]
    for _ in range(6):
        logits = (4 * torch.randn(5, VOCAB)).to(dtype)
        choose_all(together, logits, None)
        for i, row in enumerate(alone):
            scores = row.processors(row.ids, logits[i : i + 1])
            shares = scores.softmax(-1)
            row.choose(logits[i : i + 1], None)
            expected = scores.argmax(-1)
            if row.do_sample:
                expected = torch.multinomial(shares, 1, generator=generators[i])[:, 0]
            assert row.token.tolist() == together[i].token.tolist() == expected.tolist()


def test_one_row_that_fails_is_alone_with_it():
    class Failing(Row):
        error = None

        def fail(self, error):
            self.error = error

    rows = rows_of(4, {"draws": None}, do_sample=False)
    for row in rows:
        row.__class__ = Failing
    rows[1].processors = lambda ids, scores: 1 / 0
    logits = torch.randn(4, VOCAB)
    logits[2, 7] = torch.nan
    choose_all(rows, logits, made("streaming-llm", tiny_model("llama")))
    assert [type(row.error) for row in rows] == [
        type(None),
        ZeroDivisionError,
        RunError,
        type(None),
    ]
    assert [row.ids.shape[1] for row in rows] == [10, 9, 9, 10]


@pytest.mark.parametrize("num", [1, 5])
@pytest.mark.parametrize("sampling", [HOT, dict(do_sample=False)])
def test_the_device_is_asked_once_a_step(num, sampling, monkeypatch):
    model = moved(tiny_model("llama").requires_grad_(False))
    rows = rows_of(num, {}, **sampling)
    for row in rows:
        row._ids, row.token = OtherTensor(row.ids), OtherTensor(row.token)
    methods = [made("streaming-llm", model) for _ in rows]
    for row, method in zip(rows, methods, strict=True):
        row.choose(method.feed(row.ids), method)
    batch = Batch(methods[0])
    batch.join(rows, methods)
    batch.step()
    asked = []
    refuse = other_device._refuse_in_recording
    monkeypatch.setattr(other_device, "_refuse_in_recording", asked.append)
    for _ in range(3):
        batch.step()
    monkeypatch.setattr(other_device, "_refuse_in_recording", refuse)
    reads = [one for one in asked if one == "tolist" or one in other_device._READS]
    assert reads == ["tolist"] * 3
