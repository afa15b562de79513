"""A model is shared by streams, scoring and plain calls, in threads too: nothing in it is switched
while they run.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import pytest
import torch
from helpers.methods import make, tables
from helpers.tiny_models import tiny_model

import kvalign
from kvalign.methods import make_method
from kvalign.models.architectures import REGISTERED
from kvalign.streaming.scoring import score


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom", "gpt_neo"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_plain_calls_are_the_same_to_the_bit(kind, implementation, ids, tmp_path):
    """And what is saved says nothing of us."""
    model = tiny_model(kind)
    if not (implementation == "eager" or model._supports_sdpa):
        return
    model.set_attn_implementation(implementation)
    padded = torch.ones_like(ids[:, :30])
    padded[0, :7] = 0

    def calls():
        out = model(input_ids=ids[:, :30], use_cache=True)
        more = model(input_ids=ids[:, 30:33], past_key_values=out.past_key_values)
        masked = model(input_ids=ids[:, :30], attention_mask=padded)
        attentions = []
        if implementation == "eager":
            attentions = model(input_ids=ids[:, :30], output_attentions=True).attentions
        return [out.logits, more.logits, masked.logits, *attentions]

    before = calls()
    for name in ("streaming-llm", "kvalign"):
        extra = {"aligner": tables(model, scale=0.5)} if name == "kvalign" else {}
        make(name, model, **extra).feed(ids)
    own = model.config._attn_implementation
    assert own == ("kvalign_" if kind in (*REGISTERED, "bloom") else "") + implementation
    for x, expected in zip(calls(), before, strict=True):
        assert torch.equal(x, expected)
    model.save_pretrained(tmp_path)
    assert "kvalign" not in json.dumps(model.config.to_dict())
    assert "kvalign" not in (tmp_path / "config.json").read_text()
    assert type(model).from_pretrained(tmp_path).config._attn_implementation == "sdpa" or (
        not model._supports_sdpa
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall-gpt2", "recall-llama"])
def test_eight_threads(name, tmp_path):
    loaded = kvalign.load_model(name)
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = torch.randint(5, model.config.vocab_size, (1, 300), generator=torch.manual_seed(3))

    def new(method="kvalign", cache_size=32):
        return make_method(method, model, cache_size=cache_size)

    def begun(method="kvalign", seed=7):
        settings = dict(method=method, cache_size=24, seed=seed, max_new_tokens=40)
        return kvalign.stream(model, tokenizer, ids[0, :40].tolist(), **settings)

    def tokens(stream):
        list(stream)
        return torch.tensor(stream.token_ids)

    def saved(seed):
        path, stream = tmp_path / f"{current_thread().ident}-{seed}.safetensors", begun(seed=seed)
        pieces = iter(stream)
        for _ in range(20):
            next(pieces)
        stream.save(path)
        return tokens(kvalign.load_stream(path, model, tokenizer))

    def batch():
        prompts = [ids[0, :n].tolist() for n in (3, 50, 20)]
        rows = kvalign.stream_batch(
            model, tokenizer, prompts, cache_size=24, method="kvalign", seed=1, max_new_tokens=30
        )
        return torch.tensor([hash(row) for row in rows])

    work = [
        lambda: torch.cat([score(new(), ids) for _ in range(2)]),
        lambda: score(new("recompute", 16), ids[:, :90]),
        lambda: tokens(begun()),
        lambda: tokens(begun("streaming-llm", seed=8)),
        *(lambda number=number: saved(number) for number in (9, 10)),
        batch,
        lambda: torch.cat([model(input_ids=ids[:, :60]).logits[0] for _ in range(15)]),
    ]
    alone = [one() for one in work]
    with ThreadPoolExecutor(len(work)) as pool:
        together = [done.result() for done in [pool.submit(one) for one in work]]
    for one, expected in zip(together, alone, strict=True):
        assert one.shape == expected.shape and torch.allclose(one, expected, atol=1e-4)
