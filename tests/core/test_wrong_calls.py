"""Wrong use of the Python API: one sentence that says what came and what was needed."""

import pytest
import torch
from transformers import DynamicCache

import kvalign
from kvalign import Aligner, StreamingCache, load_model, make_method, stream_generate, stream_tokens
from kvalign.data_gen.corpora import texts
from kvalign.data_gen.prompts import conversations
from kvalign.sizes import CacheSizes

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def loaded():
    return load_model("gpt2-mini")


def generate(loaded, **wrong):
    """`model.generate` as a user calls it."""
    sizes = {"custom_generate": stream_generate, "cache_size": 16, "max_new_tokens": 2}
    return loaded.model.generate(PROMPT, **(sizes | wrong))


def filled(loaded):
    cache = DynamicCache()
    loaded.model(PROMPT, past_key_values=cache)
    return cache


CALLS = [
    (lambda m: load_model("gpt2-minni"), "no model 'gpt2-minni'.*did you mean gpt2-mini"),
    (lambda m: load_model("gpt2-mini", device="tpu9"), "device 'tpu9' is not available"),
    (lambda m: make_method("streamingllm", m.model, cache_size=9), "did you mean streaming-llm"),
    (lambda m: make_method("window", m.model, cache_size=0), "cache_size must be .*got 0"),
    (
        lambda m: make_method("window", m.model, cache_size=512),
        "at most 511 for gpt2-mini.*got 512",
    ),
    (
        lambda m: make_method("streaming-llm", m.model, cache_size=8, num_sinks=-1),
        "num_sinks must be",
    ),
    (lambda m: make_method("streaming-llm", m.model, cache_size=8, num_sinks=8), "above num_sinks"),
    (lambda m: make_method("window", m.model, cache_size=8, num_evicted=9), "num_evicted must be"),
    (lambda m: make_method("kvalign", m.model, cache_size=8, aligner="none"), "no aligner 'none'"),
    (
        lambda m: make_method("kvalign", m.model, cache_size=256),
        "at most 255 with the aligner kvalign-",
    ),
    (lambda m: kvalign.stream("gpt2-mini", m.tokenizer, "It"), "transformers, got str"),
    (lambda m: kvalign.stream(m.tokenizer, m.model, "It"), "causal LM of transformers, got Tok"),
    (
        lambda m: kvalign.stream(m.model, m.tokenizer, "It", max_tokens=5),
        r"stream\(\) has no keyword 'max_tokens': did you mean max_new_tokens\?",
    ),
    (lambda m: kvalign.stream(m.model, m.tokenizer, "It", topk=5), "did you mean top_k"),
    (lambda m: kvalign.stream(m.model, m.tokenizer, "It", cache_len=5), "did you mean cache_size"),
    (lambda m: kvalign.stream(m.model, m.tokenizer, "It", q=5), "'q': it has model, tokenizer, "),
    (
        lambda m: next(kvalign.stream_batch(m.model, m.tokenizer, ["It"], repeat_penalty=2.0)),
        r"stream_batch\(\) has no .* did you mean repetition_penalty",
    ),
    (
        lambda m: kvalign.load_stream("talk", m.model, m.tokenizer, temp=2.0),
        r"load_stream\(\) has no .* did you mean temperature",
    ),
    (
        lambda m: kvalign.load_stream("talk", m.model, m.tokenizer, cache_size=64),
        r"load_stream\(\) takes no cache_size: the saved stream keeps its own",
    ),
    (
        lambda m: next(kvalign.stream_batch(m.model, m.tokenizer, ["It"], batch_size=2)),
        "did you mean max_rows",
    ),
    (
        lambda m: stream_generate(m.model, PROMPT, cache_len=16),
        r"stream_generate\(\) has no keyword 'cache_len': did you mean cache_size",
    ),
    (
        lambda m: kvalign.eval.perplexity(model="gpt2-mini", cache_size=[32]),
        r"perplexity\(\) has no keyword 'cache_size': did you mean cache_sizes",
    ),
    (
        lambda m: kvalign.training.train_table(model="gpt2-mini", dataset="python-docs"),
        r"train_table\(\) has no keyword 'dataset': did you mean corpus",
    ),
    (
        lambda m: kvalign.training.import_published(model="gpt2-mini"),
        r"import_published\(\) needs \w+=",
    ),
    (lambda m: Aligner.from_pretrained("kvalign-gpt2-mini"), "no aligner 'kvalign-gpt2-mini'"),
    (lambda m: next(stream_tokens(window(m), PROMPT[:, :0])), "the prompt is empty"),
    (
        lambda m: generate(m, stop_strings=["in"], tokenizer=m.tokenizer),
        r"stopping_criteria=\[transformers.StopStringCriteria\(tokenizer",
    ),
    (lambda m: generate(m, prompt_lookup_num_tokens=3), "has no assisted generation: leave out"),
    (lambda m: generate(m, assistant_model=m.model), "has no assisted generation: leave out"),
    (lambda m: generate(m, cache_implementation="static"), "cache_implementation='static'"),
    (
        lambda m: m.model.generate(
            inputs_embeds=m.model.get_input_embeddings()(PROMPT),
            custom_generate=stream_generate,
            max_new_tokens=2,
        ),
        "input_ids in place of inputs_embeds",
    ),
    (lambda m: generate(m, num_beams=2), "no beam search.*got 2"),
    (lambda m: generate(m, return_dict_in_generate=True), "return_dict_in_generate must be False"),
    (lambda m: generate(m, attention_mask=torch.tensor([[1, 1, 0]])), "padded on the left"),
    (lambda m: generate(m, past_key_values=filled(m)), "begins a new stream"),
    (lambda m: generate(m, method="dense-ish"), "unknown method 'dense-ish'"),
    (lambda m: next(texts("wiki")), "unknown corpus 'wiki'"),
    (lambda m: conversations("bench"), "unknown prompts 'bench'"),
    (lambda m: kvalign.Streamer, "No kvalign attribute Streamer"),
    (lambda m: StreamingCache(m.spec, CacheSizes(8, 8, 1)), "cache_size must be above num_sinks"),
]


STREAMS = [
    (dict(method=3), "method must be one of auto, dense, .* got 3"),
    (dict(method=["window"]), r"method must be one of auto, .* got \['window'\]"),
    (dict(cache_size="64"), "cache_size must be a whole number, got '64'"),
    (dict(cache_size=16.0), "cache_size must be a whole number, got 16.0"),
    (dict(cache_size=True), "cache_size must be a whole number, got True"),
    (dict(num_sinks=2.0), "num_sinks must be a whole number, got 2.0"),
    (dict(num_evicted=True), "num_evicted must be a whole number, got True"),
    (dict(num_evicted=2.5), "num_evicted must be a whole number, got 2.5"),
    (dict(realign_every=1.5), "realign_every must be a whole number, got 1.5"),
    (dict(aligner=3), "aligner must be an Aligner, its folder or its name, got 3"),
    (dict(compile="no"), "compile must be True or False, got 'no'"),
    (dict(do_sample="no"), "do_sample must be True or False, got 'no'"),
    (dict(stop_at_end=1), "stop_at_end must be True or False, got 1"),
    (dict(max_new_tokens=2.5), "max_new_tokens must be a whole number, got 2.5"),
    (dict(temperature="hot"), "temperature must be a finite number, got 'hot'"),
    (dict(temperature=None), "temperature must be a finite number, got None"),
    (dict(temperature=float("nan")), "temperature must be a finite number, got nan"),
    (dict(top_p=True), "top_p must be a finite number, got True"),
    (dict(seed=1.5), "seed must be a whole number, got 1.5"),
    (dict(seed=[1, 2, 3]), r"seed must be a whole number, got \[1, 2, 3\]"),
    (dict(prompt=["It", "was"]), "input must be text or a list of token ids, got list"),
    (dict(prompt=[{"role": "user", "content": "Hi"}]), "tokenizer.apply_chat_template"),
    (dict(prompt=PROMPT), r"got Tensor .* ids\[0\].tolist\(\)"),
    (dict(prompt={"input_ids": PROMPT}), "got dict"),
    (dict(prompt=None), "got NoneType"),
    (dict(prompt=[10**6]), "token ids must be below .* for this model, got 1000000"),
]
CALLS += [
    (lambda m, wrong=wrong: kvalign.stream(m.model, m.tokenizer, **wrong), message)
    for wrong, message in STREAMS
]
CALLS += [
    (
        lambda m, wrong=wrong: next(
            kvalign.stream_batch(m.model, m.tokenizer, [PROMPT], max_rows=2, **wrong)
        ),
        message,
    )
    for wrong, message in (
        (dict(), "got Tensor"),
        (dict(seed=[1, 2]), r"seed must be a whole number, got \[1, 2\]"),
    )
]
CALLS += [
    (lambda m: next(kvalign.stream_batch(m.model, m.tokenizer, ["It"], max_rows=2.5)), "max_rows"),
    (lambda m: kvalign.load_stream("/", m.model, m.tokenizer), "/ is not a stream that kvalign"),
    (
        lambda m: kvalign.eval.perplexity(cache_sizes=[32.5]),
        "--cache-sizes must be a whole number, got 32.5",
    ),
    (
        lambda m: m.model(
            torch.arange(18)[None], past_key_values=kvalign.make_cache(m.model, cache_size=16)
        ),
        r"at most cache_size \+ 1 = 17 tokens at once, got 18",
    ),
]


def window(loaded):
    return make_method("window", loaded.model, cache_size=8)


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:40] for _, message in CALLS])
def test_wrong_calls_are_one_sentence(call, message, loaded, monkeypatch):
    monkeypatch.setattr("kvalign.hub.is_reachable", lambda: False)
    wrong = (ValueError, TypeError, FileNotFoundError, AttributeError)
    with pytest.raises(wrong, match=message) as caught:
        call(loaded)
    assert "\n" not in str(caught.value)
