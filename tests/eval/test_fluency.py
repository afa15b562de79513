"""A passage's perplexity under the model, nothing evicted."""

import math

import pytest
from helpers.tiny_models import CONTEXT_LEN, tiny_model

from kvalign.eval.judging.fluency import dense_perplexity


@pytest.mark.parametrize(("num_prompt", "num_passage"), [(1, 1), (5, 40), (40, 110), (90, 30)])
def test_dense_perplexity_sees_half_a_span_or_all(num_prompt, num_passage, ids):
    model, span = tiny_model("gpt2"), CONTEXT_LEN // 2
    stream = ids[0, : num_prompt + num_passage]
    found = dense_perplexity(model, stream[:num_prompt], stream[num_prompt:], span)
    nll, scored = 0.0, num_prompt
    while scored < len(stream):  # the same windows, token by token
        end = min(len(stream), max(scored + span // 2, span))
        for i in range(scored, end):
            seen = stream[max(0, end - span) : i]
            assert len(seen) >= min(i, span // 2)
            logits = model(input_ids=seen[None]).logits[0, -1]
            nll -= logits.log_softmax(-1)[stream[i]].item()
        scored = end
    assert math.isclose(found, math.exp(nll / num_passage), rel_tol=1e-4)
