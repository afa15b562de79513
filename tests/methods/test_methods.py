"""Each method against plain transformers: what it keeps, what it predicts, and that scoring is
stepping.
"""

import pytest
import torch
from helpers.methods import CACHE_SIZE, STREAMING, make, network, step, tables
from helpers.plain_stream import PlainStream, Plan, copy_of
from helpers.tiny_models import CONTEXT_LEN, tiny_model

from kvalign.methods import make_method
from kvalign.methods.cached import Cached
from kvalign.methods.registry import METHODS
from kvalign.streaming.scoring import hits, score, score_stepwise


@pytest.mark.parametrize("num_evicted", [1, 5])
@pytest.mark.parametrize("name", METHODS)
def test_fill_is_what_the_next_token_finds(name, num_evicted, models, ids, monkeypatch):
    method = make(name, models["llama"], num_evicted=num_evicted)
    seen, encode = [], type(method.model).forward

    def record(model, *args, past_key_values=None, **kwargs):
        num_new = kwargs["input_ids"].shape[1]
        has_cache = past_key_values is not None
        seen.append(past_key_values.get_mask_sizes(num_new, 0)[0] if has_cache else num_new)
        return encode(model, *args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(type(method.model), "forward", record)
    assert method.fill == 0
    for i in range(3 * CACHE_SIZE):
        expected = method.fill + 1
        method.feed(ids[:, i : i + 1])
        # A ring is read as it lies, with a mask over what several evictions at once have left.
        in_ring = isinstance(method, Cached) and num_evicted > 1 and i > CACHE_SIZE
        assert seen[-1] == (CACHE_SIZE + 1 if in_ring else expected)
    limit = 3 * CACHE_SIZE if name == "dense" else CACHE_SIZE
    assert CACHE_SIZE - method.sizes.num_evicted < method.fill <= limit


def test_rows_of_unequal_lengths_keep_to_the_windows_of_their_layers(ids):
    """Shorter than the cache: each row is what it is alone."""
    model = tiny_model("mistral", sliding_window=8)
    rows, alone = make("streaming-llm", model), make("streaming-llm", model)
    rows.feed(ids[:1, :30])
    for method in (short := make("streaming-llm", model)), alone:
        method.feed(ids[1:, :11])
    rows.join([short])
    for i in range(40, 70):
        found, expected = rows.feed(ids[:, i : i + 1])[1:], alone.feed(ids[1:, i : i + 1])
        assert torch.allclose(found, expected, atol=1e-4)


def test_an_aligner_may_know_more_positions_than_the_model_has(ids):
    """Chunks stay within the model's, and so do the places of what a memory takes back."""
    model = tiny_model("gpt2", n_positions=48)
    for aligner in (network(model, train=True), tables(model, 0.3)):
        method = make("kvalign", model, aligner=aligner, cache_size=40)
        method.feed(ids[:, :100])
        assert method.num_positions == 48 < aligner.config.chunk_len


def test_a_bias_by_place_counts_entries_where_positions_run_on(ids):
    """Falcon's is as long as the cache says, and its mask as the entries are."""
    model = tiny_model("falcon", alibi=True)
    sizes = dict(aligner=tables(model, 0.3), cache_size=8, num_sinks=1)
    method = make("kvalign", model, **sizes, realign_every=5)
    plan = Plan("falcon", 8, 1, realign_every=5, aligner="table")
    numbers = dict(sizes["aligner"].named_parameters())
    plain = PlainStream(copy_of(model, torch.float64, "sdpa"), plan, numbers)
    for token in ids[:1, :30].split(1, 1):
        assert (method.feed(token)[0] - plain.take(token[0])).abs().max() < 1e-5


def test_tables_that_change_nothing_are_streaming_llm(ids):
    model = tiny_model("mistral", sliding_window=8)
    first = CACHE_SIZE + 1
    plain = step(make("streaming-llm", model), ids[:, :80], first)
    aligned = step(make("kvalign", model, aligner=tables(model)), ids[:, :80], first)
    assert torch.allclose(aligned, plain, atol=1e-4)


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("num_evicted", [1, 3])
def test_scoring_is_stepping(name, models, ids, num_evicted):
    """By any measure, of all labels or of those that are wanted."""
    for kind in ("gpt2", "llama"):
        method = make(name, models[kind], num_evicted=num_evicted)
        for num_tokens in (CACHE_SIZE + 2, 60):
            expected = score_stepwise(method, ids[:1, :num_tokens])
            counted = []
            assert torch.allclose(
                score(method, ids[:1, :num_tokens], counted.append), expected, atol=1e-4
            )
            assert sum(counted) == len(expected) == num_tokens - CACHE_SIZE - 1
    expected = score_stepwise(method, ids[:1, :60], measure=hits)
    assert set(expected.tolist()) <= {0.0, 1.0}
    wanted = torch.arange(len(expected)) % 5 == 2
    found = score(method, ids[:1, :60], counted.append, hits, wanted)
    assert torch.equal(found[wanted], expected[wanted]) and sum(counted) == 2 * len(expected)
    if name == "recompute" and num_evicted == 1:
        assert found[~wanted].isnan().all()


@pytest.mark.parametrize("name", STREAMING)
def test_largest_cache_fits_the_positions(name, models, ids):
    for kind in ("gpt2", "opt", "mpt"):
        method = make(name, models[kind], cache_size=CONTEXT_LEN - 1)
        assert torch.isfinite(step(method, ids[:, :80], CONTEXT_LEN)).all()


def test_dense_stops_at_the_context_length(models, ids):
    dense = make("dense", models["gpt2"])
    dense.feed(ids[:, :CONTEXT_LEN])
    assert dense.tokens_left == 0
    with pytest.raises(ValueError, match="dense has room for 0 more tokens"):
        dense.feed(ids[:, :1])


def test_aligner_of_other_weights_or_sizes_is_refused(models):
    model = models["gpt2"]
    other = tiny_model("gpt2")
    other.transformer.wte.weight.mul_(1.5)
    with pytest.raises(ValueError, match="embedding weights"):
        make("kvalign", other, aligner=network(model))
    with pytest.raises(ValueError, match="cache_size must be at most 31 with this aligner"):
        make("kvalign", model, cache_size=40, aligner=network(model, chunk_len=32))
    with pytest.raises(
        ValueError, match="num_evicted or realign_every must be a multiple of 4 with"
    ):
        make("kvalign", model, num_evicted=6, aligner=network(model, shifts=(4,)))
    with pytest.raises(ValueError, match="no aligner ships.*use method discard-half"):
        make_method("kvalign", model, cache_size=20)
    with pytest.raises(ValueError, match="no aligner ships.*use method streaming-llm"):
        make_method("kvalign", models["llama"], cache_size=20)
    with pytest.raises(ValueError, match="num_sinks must be 4 with this aligner"):
        make("kvalign", model, num_sinks=2, aligner=network(model))
    make("kvalign", tiny_model("gpt2").to(torch.bfloat16), aligner=network(model))
