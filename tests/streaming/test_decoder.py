"""Tokens as text, one by one: whatever they are, and however an input is cut."""

import pytest
from helpers.byte_fallback import BYTES, SPECIAL, TOKENS, byte_fallback_model
from hypothesis import given, settings
from hypothesis import strategies as st

import kvalign
from kvalign import checkpoints
from kvalign.models.loading import load_model
from kvalign.streaming.answer import Answer, Decoder
from kvalign.streaming.sampling import Sampling

LOADED = {"byte-fallback": byte_fallback_model()}
WRITERS = [name for name, purpose in checkpoints.PURPOSES.items() if purpose == "writes text"]
NAMES = ("byte-fallback", *WRITERS)
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
        if token in SPECIAL:
            continue
        num_waiting += 1
        if token in BYTES:
            run += bytes([int(token[1:-1], 16)])
        else:
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


@pytest.mark.parametrize("name", WRITERS)
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


def shown_by(ids, **sampling):
    """The text that can be shown of an answer of these tokens, the number of those until its end,
    and the reason for that.
    """
    tokenizer, ends = loaded("byte-fallback").tokenizer, sampling.pop("ends", ())
    answer, text = Answer(tokenizer, spelled("hello"), Sampling(**sampling), ends), ""
    for token in ids:
        if not answer.finish:
            text += answer.take(token)[1]
    return text, len(answer.token_ids), answer.finish


WORDS = [*spelled("hello t.é"), *map(TOKENS.index, SPECIAL)]
PARTS = ("l", "t.", " t", "é", "</s>", "s>", "<s><s>", "</s>t", ".<unk>", "t<s>é", "><", "ll")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=30), st.sets(st.sampled_from(PARTS), max_size=3))
def test_a_stop_string_ends_a_text_with_special_tokens_and_without(ids, strings):
    """With them as they are written, and as it is shown, without them."""
    written = [(x, i) for i, one in enumerate(ids) for x in TOKENS[one].replace("▁", " ")]
    expected = ("".join(x for x, i in written if TOKENS[ids[i]] not in SPECIAL), len(ids), "")
    for num in range(1, len(ids) + 1):
        whole = [(place, x) for place, (x, i) in enumerate(written) if i < num]
        shown = [one for one in whole if TOKENS[ids[written[one[0]][1]]] not in SPECIAL]
        texts = [(view, "".join(x for _, x in view)) for view in (whole, shown)]
        starts = [view[text.index(x)][0] for view, text in texts for x in strings if x in text]
        if starts:
            expected = ("".join(x for place, x in shown if place < min(starts)), num, "stop")
            break
    text, num, finish = shown_by(ids, stop_strings=[*strings])
    assert (num, finish) == expected[1:]
    assert text == expected[0] if finish else expected[0].startswith(text)


def test_an_end_token_completes_a_stop_string_and_is_not_shown():
    end, ids = TOKENS.index("</s>"), spelled("hello t.")
    how = dict(stop_strings=["t.</s>"], ends=[end])
    assert shown_by([*ids, end], **how) == (" hello ", len(ids) + 1, "stop")
    assert shown_by([*ids, end], ends=[end]) == (" hello t.", len(ids) + 1, "stop")
    assert shown_by([*ids, 0], max_new_tokens=len(ids), **how)[2] == "length"


def test_special_tokens_may_be_spelled_out():
    """Those that are named; they come after the text before them, even of half a character."""
    tokenizer, (unknown, begin, end) = loaded("byte-fallback").tokenizer, map(TOKENS.index, SPECIAL)
    answer = Answer(tokenizer, spelled("hello"), Sampling(), [], spelled=[begin, end])
    ids = [*spelled("t"), begin, unknown, *spelled("é😀")[-3:-1], end, *spelled("t")]
    assert [answer.take(token)[1] for token in ids] == [
        " t",
        "<s>",
        "",
        "",
        "",
        BROKEN * 2 + "</s>",
        " t",
    ]


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
