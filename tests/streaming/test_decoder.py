"""Tokens as text, one by one: whatever they are, and however an input is cut."""

import pytest
from helpers.byte_fallback import BYTES, SPECIAL, TOKENS, byte_fallback_model
from hypothesis import given, settings
from hypothesis import strategies as st

import kvalign
from kvalign import checkpoints
from kvalign.models.loading import load_model
from kvalign.streaming.answer import Decoder

LOADED = {"byte-fallback": byte_fallback_model()}
NAMES = ("byte-fallback", *checkpoints.WRITERS)
BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST = 16
few = settings(max_examples=60, deadline=None)


def loaded(name):
    if name not in LOADED:
        LOADED[name] = load_model(name)
    return LOADED[name]


def spelled(text, name="byte-fallback"):
    return loaded(name).tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces(tokenizer, before, ids):
    decoder = Decoder(tokenizer, before)
    return "".join(map(decoder.step, ids))


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_a_text_is_the_text_of_all_its_tokens(name, data):
    """Cut anywhere, in the middle of a character too; what is cut off at its end stays out."""
    tokenizer = loaded(name).tokenizer
    text = st.text(st.sampled_from("hello t.é€😀日\u0301"), min_size=1, max_size=40)
    ids = spelled("hello " + data.draw(text), name)
    ids = ids[: data.draw(st.integers(2, len(ids)))]
    start = data.draw(st.integers(1, len(ids) - 1))
    before, whole = (without_end(tokenizer, x) for x in (ids[:start], ids))
    assert before + pieces(tokenizer, ids[:start], ids[start:]) == whole


def without_end(tokenizer, ids):
    """The text of ids, but for an incomplete character at its end."""
    while (text := tokenizer.decode(ids)).endswith(BROKEN):
        ids = ids[:-1]
    return text


def by_hand(ids):
    """The text of bytes and words: bytes wait until all that wait are characters."""
    text, run, num_waiting = "", b"", 0
    for token in (TOKENS[i] for i in ids):
        num_waiting += 1
        if token in BYTES:
            run += bytes([int(token[1:-1], 16)])
        elif token not in SPECIAL:
            text, run, num_waiting = text + BROKEN * len(run) + token.replace("▁", " "), b"", 0
        if run and is_whole(run):
            text, run, num_waiting = text + run.decode(), b"", 0
        if num_waiting == MOST:
            text, run, num_waiting = text + BROKEN * len(run), b"", 0
    return text


def is_whole(run):
    try:
        return bool(run.decode())
    except UnicodeDecodeError:
        return False


parts = st.sampled_from([*spelled("hello😀"), *spelled("a日é€ t"), TOKENS.index("<0xFF>")])
any_token = parts | st.integers(0, len(TOKENS) - 1)


@few
@given(st.lists(any_token, max_size=60))
def test_any_tokens_with_byte_fallback(ids):
    tokenizer = loaded("byte-fallback").tokenizer
    before = spelled("hello")
    found = pieces(tokenizer, before, ids)
    assert found == by_hand(ids)
    whole = tokenizer.decode(before + ids, skip_special_tokens=True)
    assert BROKEN in whole or whole == "hello" + found


@pytest.mark.parametrize("name", checkpoints.WRITERS)
@few
@given(data=st.data())
def test_any_tokens_without(name, data):
    """Where bytes that are no character do not change those before."""
    tokenizer = loaded(name).tokenizer
    tokens = st.integers(0, len(tokenizer) - 1).filter(lambda i: i not in tokenizer.all_special_ids)
    ids, before = data.draw(st.lists(tokens, max_size=MOST)), spelled("hello", name)
    whole = tokenizer.decode(before + ids, skip_special_tokens=True)
    found = tokenizer.decode(before) + pieces(tokenizer, before, ids)
    assert whole.startswith(found) and (found == whole or whole.endswith(BROKEN))


@pytest.mark.parametrize("num_cut", [1, 2, 3])
def test_an_input_that_ends_in_a_character(num_cut):
    """The next one follows; a stream has each token once."""
    model, tokenizer = loaded("byte-fallback").model, loaded("byte-fallback").tokenizer
    stream = kvalign.stream(model, tokenizer, cache_size=24, max_new_tokens=20, seed=0)
    first, second = spelled("a😀😀")[:-num_cut], spelled(" hello")
    stream.feed(first)
    stream.feed(second)
    assert stream.ids == first + second
    text = "".join(stream)
    assert text == stream.text == by_hand(stream.token_ids)
