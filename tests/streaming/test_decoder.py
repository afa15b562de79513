"""Tokens as text, one by one: whatever they are, and however an input is cut."""

import pytest
from helpers.byte_fallback import BYTES, SPECIAL, TOKENS, byte_fallback_model
from helpers.served import serving
from hypothesis import given, settings
from hypothesis import strategies as st

import kvalign
from kvalign import checkpoints
from kvalign.app.sessions.conversation import Conversation, ConversationSettings
from kvalign.models.loading import load_model
from kvalign.streaming.decoder import Decoder

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


def test_a_long_word_of_bytes_is_no_garbage_after_it():
    """What came before is looked at from the beginning of a character."""
    ids = spelled("日" * 30)
    for num_left in range(4):
        end = len(ids) - num_left
        found = pieces(loaded("byte-fallback").tokenizer, ids[:end], [*ids[end:], *spelled("t")])
        assert found == "日" * (-(-num_left // 3)) + " t"


def test_a_space_of_a_byte_is_a_character():
    """A byte that makes none would turn it into none, too, were it not told from its text alone."""
    space, broken = (TOKENS.index(f"<0x{byte}>") for byte in ("20", "F0"))
    for num in (1, 2, 40):
        found = pieces(
            loaded("byte-fallback").tokenizer,
            spelled("hello"),
            [*[space] * num, broken, *spelled("t")],
        )
        assert found == " " * num + BROKEN + " t"


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


def test_an_input_that_is_refused_leaves_the_stream(monkeypatch):
    model, tokenizer = loaded("byte-fallback").model, loaded("byte-fallback").tokenizer
    stream = kvalign.stream(model, tokenizer, "hello", cache_size=24, max_new_tokens=5, seed=0)
    text = "".join(stream)
    ids = list(stream.ids)
    with monkeypatch.context() as patch:
        patch.setattr("kvalign.streaming.text_stream.Answer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.feed(" hello")
    assert stream.ids == ids and stream.text == text


def test_streams_batches_and_files_with_byte_fallback(tmp_path):
    model, tokenizer = loaded("byte-fallback").model, loaded("byte-fallback").tokenizer
    options = dict(cache_size=24, max_new_tokens=60, temperature=3.0)
    prompts = ["hello 😀日", "t é"]
    texts = []
    for i, prompt in enumerate(prompts):
        stream = kvalign.stream(model, tokenizer, prompt, seed=5 + i, **options)
        texts.append("".join(stream))
        assert texts[-1] == by_hand(stream.token_ids)
        stream.save(tmp_path / "stream")
        assert kvalign.load_stream(tmp_path / "stream", model, tokenizer).text == texts[-1]
    rows = ["", ""]
    for row, piece in kvalign.stream_batch(model, tokenizer, prompts, seed=5, **options):
        rows[row] += piece
    assert rows == texts


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_nothing_fails(name, data):
    """Special tokens and ids that no token has, too; and what waits is bounded."""
    tokenizer = loaded(name).tokenizer
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 9), max_size=80))
    start = data.draw(st.integers(0, len(ids)))
    decoder = Decoder(tokenizer, ids[:start])
    for token in ids[start:]:
        decoder.step(token)
        assert len(decoder._waiting) < MOST


@pytest.mark.slow
def test_a_server_with_byte_fallback():
    """Pieces are the text that comes at once."""
    server = serving(loaded("byte-fallback"), cache_size=24)
    with server as served, served.client() as client:
        asked = dict(model="tiny", max_tokens=60, temperature=2.0, seed=3)
        for prompt in ("hello 😀", "a日é"):
            create = client.completions.create
            told = create(prompt=prompt, stream=True, **asked)
            text = "".join(event.choices[0].text for event in told if event.choices)
            assert len(text) > 5 and create(prompt=prompt, **asked).choices[0].text == text


@pytest.mark.slow
def test_a_conversation_with_byte_fallback():
    settings = ConversationSettings(
        model="tiny", cache_size=24, max_new_tokens=30, temperature=3.0, seed=1
    )
    talk = Conversation(settings, loaded("byte-fallback"))
    for turn in ("hello 😀", "日é", "t"):
        assert "".join(talk.answer(turn)) == talk.stream.text == by_hand(talk.stream.token_ids)
