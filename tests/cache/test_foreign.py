"""What transformers and whoever prints it ask of a streaming cache."""

import random

import pytest
import torch

import kvalign

SIZES = dict(method="streaming-llm", cache_size=20)


def test_plain_generate_is_refused_at_its_first_call(model, ids):
    """Its position ids grow with the stream: learned ones run out, rotary ones are others."""
    cache = kvalign.make_cache(model, **SIZES)
    with pytest.raises(kvalign.UserError, match="custom_generate=kvalign.stream_generate"):
        model.generate(ids[:1, :15], past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert not cache.seen


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
@pytest.mark.parametrize(
    "sizes",
    [{}, dict(num_evicted=6), dict(policy="key-norm"), dict(policy="key-norm", num_evicted=6)],
)
@torch.no_grad()
def test_tokens_of_one_call_are_as_single_ones_or_refused(kind, sizes, models, ids):
    """More than fit would see entries that are evicted between them. What is refused changes
    nothing.
    """
    model, several, single = (
        models[kind],
        *(kvalign.make_cache(models[kind], **SIZES, **sizes) for _ in range(2)),
    )
    rng, at = random.Random(0), 0
    while at < 70:
        with pytest.raises(kvalign.UserError, match=f"got {several.room + 1}"):
            model(ids[:, at : at + several.room + 1], past_key_values=several)
        num = rng.randint(1, several.room)
        found = model(ids[:, at : at + num], past_key_values=several).logits
        expected = [
            model(ids[:, i : i + 1], past_key_values=single).logits for i in range(at, at + num)
        ]
        assert torch.allclose(found, torch.cat(expected, 1), atol=1e-4)
        at += num
