"""The cache_size that nobody names: what the model and the machine allow."""

import pytest
from helpers.tiny_models import CONTEXT_LEN, tiny_model

import kvalign
from kvalign.cache import default_size as module
from kvalign.cache.default_size import LARGEST_DEFAULT, OF_A_MINI, default_size
from kvalign.methods import make_cache, make_method


def test_it_is_the_context_length_less_the_new_token(models):
    for kind in ("llama", "gpt2", "mpt"):
        assert make_method("auto", models[kind]).sizes.cache_size == CONTEXT_LEN - 1
    assert make_cache(models["llama"]).sizes.cache_size == CONTEXT_LEN - 1
    method = make_method("streaming-llm", models["llama"])
    assert method.why_size == f"the context length {CONTEXT_LEN}"
    assert make_method("streaming-llm", models["llama"], cache_size=30).why_size == ""


def test_it_leaves_room_for_positions_that_run_on(models):
    for realign_every in (1, 2, 16):
        size = default_size(models["gpt2"], realign_every=realign_every)[0]
        sizes = kvalign.CacheSizes(size, realign_every=realign_every)
        sizes.check_fits(kvalign.models.spec_of(models["gpt2"].config))
        assert sizes.last_position == CONTEXT_LEN - 1


def test_it_is_at_most_what_the_aligner_is_for(models):
    assert default_size(models["gpt2"], longest=20)[0] == 20
    assert default_size(models["gpt2"], longest=20, realign_every=4)[0] == 17


@pytest.mark.parametrize(
    ("context_len", "free", "num_streams", "size", "why"),
    [
        (100_000, 2**40, 1, LARGEST_DEFAULT, "the largest default"),
        (100_000, 4_000_000, 1, 2604, "a quarter of the free memory"),
        (100_000, 4_000_000, 4, 651, "a quarter of the free memory"),
        (100_000, 1, 1, 128, "a quarter of the free memory"),
    ],
)
def test_it_is_what_memory_holds(context_len, free, num_streams, size, why, monkeypatch):
    """An entry of the tiny llama: 3 layers, 2 heads of 8, keys and values in 4 bytes: 384 bytes."""
    model = tiny_model("llama", num_hidden_layers=3, max_position_embeddings=context_len)
    monkeypatch.setattr(module, "free_bytes", lambda device: free)
    assert default_size(model, num_streams=num_streams) == (size, why)


def test_more_entries_of_8_bits_fit(monkeypatch):
    """An entry of the tiny llama takes 144 bytes: 8 numbers and a scale where 8 floats were."""
    model = tiny_model("llama", num_hidden_layers=3, max_position_embeddings=100_000)
    monkeypatch.setattr(module, "free_bytes", lambda device: 400_000)
    for changes, size in (({}, 260), (dict(cache_dtype="int8"), 694)):
        assert make_method("streaming-llm", model, **changes).sizes.cache_size == size


def test_a_mini_model_has_few(loaded):
    stream = kvalign.stream(loaded.model, loaded.tokenizer, "The island")
    assert (stream.method.name, stream.method.sizes.cache_size) == ("kvalign", OF_A_MINI)
