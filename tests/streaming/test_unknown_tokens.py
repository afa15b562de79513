"""Tokens for which a model has logits and its tokenizer no text are not drawn, and have names."""

import pytest
import torch
from helpers.byte_fallback import SPECIAL, TOKENS, byte_fallback_tokenizer
from helpers.served import serving
from helpers.tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import kvalign
from kvalign.app.serve.forms import Constraints
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of
from kvalign.models.input_ids import ids_of, masked, num_ids, unknown_ids
from kvalign.models.loading import LoadedModel
from kvalign.streaming.answer import token_bytes
from kvalign.training.pretraining_inputs import build_model
from kvalign.training.pretraining_settings import PretrainSettings

HOLES = range(3, 40, 4)  # bytes that the tokenizer lacks
NUM_LOGITS = len(TOKENS) + 64
UNKNOWN = [*HOLES, *range(len(TOKENS), NUM_LOGITS)]
BROKEN = "\N{REPLACEMENT CHARACTER}"
FREE = dict(method="streaming-llm", cache_size=24)


@pytest.fixture(scope="module")
def padded():
    """A random model with more logits than tokens, and a tokenizer with holes."""
    tokenizer = byte_fallback_tokenizer()
    backend = tokenizer.backend_tokenizer
    vocabulary = {x: i for x, i in backend.get_vocab().items() if i not in HOLES}
    backend.model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    model = tiny_model("llama", vocab_size=NUM_LOGITS)
    with torch.no_grad():
        model.lm_head.weight[UNKNOWN] *= 3  # likely ones
    return LoadedModel(model, tokenizer, spec_of(model.config, "tiny"))


def test_they_are_those_without_a_name(padded):
    assert unknown_ids(padded.tokenizer, NUM_LOGITS) == UNKNOWN
    assert all(padded.tokenizer.convert_ids_to_tokens(x) is None for x in UNKNOWN)
    assert unknown_ids(byte_fallback_tokenizer(), len(TOKENS)) == []


def test_a_form_and_a_new_model_have_the_tokens_behind_holes(padded):
    tokenizer = padded.tokenizer
    assert len(tokenizer) < num_ids(tokenizer) == len(TOKENS)
    assert Constraints(tokenizer, [2])._tokenizer.vocab_size == len(TOKENS)
    settings = PretrainSettings(out="none", corpus=("none",))
    assert build_model(settings, tokenizer).config.vocab_size == len(TOKENS)


@pytest.mark.parametrize("more", [dict(do_sample=False), dict(top_k=0, seed=1), dict(lookup=4)])
def test_no_stream_has_them(padded, more):
    how = dict(max_new_tokens=100, repetition_penalty=1.5, **FREE, **more)
    stream = kvalign.stream(padded.model, padded.tokenizer, "hello", **how)
    "".join(stream)
    assert len(stream.token_ids) == 100 and not {*stream.token_ids} & {*UNKNOWN}
    if "lookup" not in more:
        texts = ["", ""]
        prompts = ["hello", "the"]
        for row, piece in kvalign.stream_batch(padded.model, padded.tokenizer, prompts, **how):
            texts[row] += piece
        assert texts[0] == stream.text


def test_nor_is_one_an_input(padded):
    with pytest.raises(UserError, match="^token 7 is not in the tokenizer, which has no text for"):
        kvalign.stream(padded.model, padded.tokenizer, **FREE).feed([1, 7, len(TOKENS)])


def test_logprobs_name_them_and_say_where_each_token_begins(padded):
    asked = dict(model="tiny", prompt="hello", max_tokens=200, seed=1, temperature=1, logprobs=5)
    with serving(padded, stop_at_end=False, **FREE) as server, server.client() as client:
        more = dict(top_p=1, extra_body={"top_k": 0})
        choice = client.completions.create(**asked, **more).choices[0]
        with pytest.raises(Exception, match="token 7 is not in the tokenizer"):
            client.completions.create(**asked | {"prompt": [1, 7]})
    told = choice.logprobs
    assert not any("unused" in one for one in told.tokens)
    tops = {one for top in told.top_logprobs for one in top}
    assert f"<unused-{len(TOKENS)}>" in tops and not tops & {"None", ""}
    assert BROKEN in told.tokens and {*SPECIAL} & {*told.tokens}
    for name, offset in zip(told.tokens, told.text_offset, strict=True):
        here = choice.text[offset:]  # a byte may be a part of what is no character, or not yet
        assert not here or here.startswith((name, BROKEN)) or name in (*SPECIAL, BROKEN)


@pytest.mark.parametrize("decoder", ["bytes", "words", "pieces", "ends"])
def test_a_token_is_called_what_it_writes(decoder):
    """In the middle of a text, whatever its vocabulary writes it as."""
    names, whole = {
        "bytes": (["Ġin", "Ã", "©"], [b" in", b"\xc3", b"\xa9"]),
        "words": (["▁in", "▁", "n"], [b" in", b" ", b"n"]),
        "pieces": (["in", "##n", "."], [b" in", b"n", b"."]),
        "ends": (["in</w>", "n", ".</w>"], [b" in", b"n", b" ."]),
    }[decoder]
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(names)}, []))
    tokenizer.decoder = {
        "bytes": decoders.ByteLevel,
        "words": decoders.Metaspace,
        "pieces": decoders.WordPiece,
        "ends": decoders.BPEDecoder,
    }[decoder]()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert [token_bytes(fast, i) for i in range(5)] == [*whole, b"</s>", b"<unused-4>"]


def test_text_in_a_vocabulary_with_holes_is_text():
    """No token of it is a special one, with whose words a copy of the tokenizer is extended."""
    vocabulary = {"a": 0, "b": 1, "</s>": 2, "e": 5, "d": 6, "c": 7}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    (free,), masks = masked(["abcde</s>"], fast)
    assert ids_of(free, fast, prefix=False, masks=masks) == [0, 1, 7, 6, 5]
    assert ids_of("abcde</s>", fast, prefix=False, masks=masks) == [0, 1, 7, 6, 5, 2]
