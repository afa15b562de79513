"""What a policy, or positions that are kept, cannot do: one line each, before any work where it can
be known.
"""

import pytest
from helpers.methods import network, tables
from helpers.tiny_models import CONTEXT_LEN, tiny_model

import kvalign
from kvalign.foundation.errors import UserError

REFUSED = [
    ("gpt2", dict(policy="h20"), r"policy must be one of .*, got 'h20': did you mean h2o"),
    ("llama", dict(positions="keep", compile=True), "with keep positions cannot be compiled"),
    *(
        (kind, dict(policy=policy), f"policy {policy} reads attention weights, which {kind} models")
        for kind in ("gpt_neo", "bloom", "mpt")
        for policy in ("tova", "h2o")
    ),
    *((kind, dict(positions="keep"), "positions=keep .* ALiBi") for kind in ("bloom", "mpt")),
]
NEED_ALIGNER = [
    ("gpt2", network, dict(policy="random"), "kind network moves all entries by one shift"),
    ("llama", network, dict(policy="h2o"), "kind network .* by itself \\(table, table-network\\)"),
    ("gpt2", tables, dict(positions="keep"), "nothing to align: use method streaming-llm"),
]


def refusal(name, model, **sizes):
    with pytest.raises(UserError) as caught:
        kvalign.make_method(name, model, **(dict(cache_size=20, num_sinks=4, warn=False) | sizes))
    assert "\n" not in str(caught.value)
    return caught


@pytest.mark.parametrize(("kind", "sizes", "message"), REFUSED)
def test_refused(kind, sizes, message, models):
    assert refusal("streaming-llm", models[kind], **sizes).match(message)


@pytest.mark.parametrize(("kind", "make", "sizes", "message"), NEED_ALIGNER)
def test_refused_with_an_aligner(kind, make, sizes, message, models):
    model = models[kind]
    assert refusal("kvalign", model, aligner=make(model), **sizes).match(message)


def test_layers_that_see_a_window_are_refused():
    model = tiny_model("mistral", sliding_window=8)
    assert refusal("streaming-llm", model, policy="h2o").match(
        "layers of this model see only a window"
    )


@pytest.mark.parametrize("policy", ["oldest", "keydiff", "h2o"])
@pytest.mark.parametrize("cut", [1, 9, CONTEXT_LEN + 1])
def test_learned_positions_that_are_kept_end(policy, cut, models, ids):
    """A stream ends there; feeding one token more is refused, and changes nothing."""
    sizes = dict(cache_size=20, policy=policy, positions="keep")
    method = kvalign.make_method("streaming-llm", models["gpt2"], **sizes)
    num_fed = CONTEXT_LEN // cut * cut
    for start in range(0, num_fed, cut):
        method.feed(ids[:, start : start + cut])
    with pytest.raises(UserError) as caught:
        method.feed(ids[:, num_fed : num_fed + cut])
    assert caught.match(
        f"with the {CONTEXT_LEN} positions .* got {cut} more tokens after {num_fed}"
    )
    assert "\n" not in str(caught.value)
    assert method.tokens_left == CONTEXT_LEN - num_fed
    assert method.cache.seen == ([num_fed] * 2 if num_fed else [])
    tokens = list(kvalign.stream_tokens(method, ids[:, :50]))
    assert len(tokens) == CONTEXT_LEN - 50 + 1


def test_a_row_ends_where_its_positions_do(models):
    """One after the other, as each does alone; the others go on."""
    of_model = models["gpt2"], kvalign.load_model("gpt2-mini").tokenizer
    how = dict(method="streaming-llm", cache_size=16, policy="h2o", positions="keep")
    how |= dict(temperature=0, stop_at_end=False)
    prompts = [[5] * 3, [6, 7] * 12, [8]]
    texts = ["" for _ in prompts]
    for row, piece in kvalign.stream_batch(*of_model, prompts, **how):
        texts[row] += piece
    for prompt, text in zip(prompts, texts, strict=True):
        alone = kvalign.stream(*of_model, **how)
        alone.feed(prompt)
        assert "".join(alone) == text and text
        assert len(alone.ids) == CONTEXT_LEN + 1


def test_a_loop_of_ones_own_is_told_of_the_end(models, ids):
    cache = kvalign.make_cache(
        models["gpt2"], method="streaming-llm", cache_size=20, positions="keep"
    )
    for i in range(CONTEXT_LEN):
        models["gpt2"](ids[:, i : i + 1], past_key_values=cache)
    with pytest.raises(UserError, match=f"got 1 more tokens after {CONTEXT_LEN}"):
        models["gpt2"](ids[:, :1], past_key_values=cache)


def test_rotary_positions_that_are_kept_go_on(models, ids):
    """Beyond the context, as far as it goes; unless the rotation is another one there."""
    sizes = dict(cache_size=20, policy="random", positions="keep")
    method = kvalign.make_method("streaming-llm", models["llama"], **sizes)
    assert method.tokens_left is None
    assert method.feed(ids).isfinite().all() and method.cache.positions() == [ids.shape[1]] * 2
    bounded = tiny_model("llama", rope_parameters=dict(rope_type="dynamic", factor=2.0))
    method = kvalign.make_method("streaming-llm", bounded, **sizes)
    assert method.tokens_left == CONTEXT_LEN
