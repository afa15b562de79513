"""Sessions that are stepped together are the streams that each is alone: every method that joins
rows, both families of positions.
"""

import itertools
import queue

import pytest
from helpers.pairwise import one_of_each
from helpers.patience import PATIENCE_S
from helpers.served import running
from helpers.tiny_models import first_layers
from helpers.uncompiled_step import not_compiled

import kvalign
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.turn import AnswerPiece, End
from kvalign.app.serve.wire import ChatRequest
from kvalign.models import kernel
from kvalign.models.loading import load_model
from kvalign.streaming.turns import Talk

METHODS = [
    {"method": "kvalign", "memory": 0},
    *({"method": x} for x in ("streaming-llm", "window", "discard-half", "recompute")),
    {"method": "streaming-llm", "policy": "h2o"},
    {"method": "kvalign", "policy": "keydiff", "num_evicted": "2"},
]
STORED = {"method": "streaming-llm", "compile": True}
TALKS = (
    ("Who lived there?", "And what became of the king?"),
    ("Once upon a time there was an island, far away in the north, and nobody knew of it",),
    ("A", "B", "A"),
)

MODELS = ("gpt2-mini", "llama-mini")


@pytest.fixture(scope="module")
def minis(minis):
    """Of the one that needs no aligner two layers, which join as all do."""
    return minis | {"llama-mini": first_layers(load_model("llama-mini"), 2)}


def asked(service, turn, name, **more):
    """The queue to which a turn's events come."""
    events = queue.Queue()
    fields = dict(model="any", messages=[{"role": "user", "content": turn}], session=name)
    service.chat(ChatRequest(**fields, temperature=0, max_tokens=6, **more), events.put)
    return events


def text_of(events):
    text = ""
    while not isinstance(event := events.get(timeout=PATIENCE_S), End):
        assert isinstance(event, AnswerPiece), event
        text += event.text
    return text


def last_of(events):
    """How a turn has ended."""
    while isinstance(event := events.get(timeout=PATIENCE_S), AnswerPiece):
        pass
    return event


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(*x, marks=pytest.mark.slow if x[0] > 1 else ())
        for x in one_of_each(range(len(METHODS)), MODELS)
    ],
)
def test_sessions_are_their_streams(number, name, minis):
    sessions_are_streams(METHODS[number], name, minis)


@pytest.mark.slow
@pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")
def test_sessions_with_stored_steps_are_their_streams(minis, monkeypatch):
    """One session and several, which come and go; each conversation has sinks of its own."""
    found = not_compiled(monkeypatch)
    sessions_are_streams(STORED, "llama-mini", minis)
    assert set(found) >= {1, 2, 3}


def sessions_are_streams(method, name, minis):
    loaded = minis[name]
    with running(loaded, cache_size=24, **method) as service:
        answers = [[] for _ in TALKS]
        for number in range(max(map(len, TALKS))):
            going = [i for i, turns in enumerate(TALKS) if number < len(turns)]
            waiting = [asked(service, TALKS[i][number], f"s{i}") for i in going]
            for i, events in zip(going, waiting, strict=True):
                answers[i].append(text_of(events))
    for turns, said in zip(TALKS, answers, strict=True):
        how = dict(cache_size=24, do_sample=False, max_new_tokens=6, stop_at_end=True)
        how |= method | {"compile": False}
        stream = kvalign.stream(loaded.model, loaded.tokenizer, **how)
        for turn, text in zip(turns, said, strict=True):
            stream.feed(Talk(loaded.tokenizer).turn_ids(turn, not stream.ids))
            assert text == "".join(stream)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4])
def test_a_step_that_fails_ends_its_turns_and_nothing_else(number, minis, caplog):
    """Asked again, sessions go on from where they were, and so do those that come later."""
    method, loaded = METHODS[number], minis["gpt2-mini"]
    layer, texts = loaded.model.transformer.h[1], {}
    with running(loaded, cache_size=24, **method) as service:
        for failing in (False, True):
            for name in ("a", "b"):
                text_of(asked(service, "Who lived there?", f"{name}{failing}"))
            names, failed = [f"{x}{failing}" for x in "abc"], range(3)
            if failing:
                calls = itertools.count()

                def fail(*args, calls=calls):
                    if next(calls) == 4:
                        raise RuntimeError("planted")

                with layer.register_forward_pre_hook(fail):
                    waiting = [asked(service, "Why?", name) for name in names]
                    ends = [last_of(events) for events in waiting]
                failed = [i for i, end in enumerate(ends) if isinstance(end, RequestError)]
                assert failed and {ends[i].code for i in failed} == {"stream_failed"}
            waiting = {i: asked(service, "Why?", names[i]) for i in failed}
            texts[failing] = {i: text_of(events) for i, events in waiting.items()}
    assert texts[True].items() <= texts[False].items()
    assert service.engine.num_rows == 0
    assert "planted" in caplog.text


@pytest.mark.slow
def test_a_long_prompt_goes_in_by_parts_and_others_go_on(minis, monkeypatch):
    """Another row is stepped between two parts; what is said is that of a stream."""
    monkeypatch.setattr("kvalign.app.serve.engine.PART", 128)
    loaded, order = minis["gpt2-mini"], []
    with running(loaded, cache_size=64, memory=0) as service:
        short = queue.Queue()
        fields = dict(model="any", temperature=0, max_tokens=16)
        hello = [{"role": "user", "content": "Hello"}]

        def ask(name, messages, events):
            told = lambda e: (order.append(name), events.put(e))  # noqa: E731
            service.chat(ChatRequest(messages=messages, **fields), told)

        ask("short", hello, short)
        assert isinstance(short.get(timeout=PATIENCE_S), AnswerPiece)  # it is being stepped
        text = "the king of the island had a ship and " * 100
        long = [{"role": "user", "content": text}]
        events = queue.Queue()
        ask("long", long, events)
        answer = text_of(events)
    assert order.index("long") > 4
    stream = kvalign.stream(
        loaded.model, loaded.tokenizer, cache_size=64, do_sample=False, max_new_tokens=16
    )
    stream.feed(Talk(loaded.tokenizer).turn_ids(text, True))
    assert answer == "".join(stream)
