"""Sessions that are stepped together are the streams that each is alone: every method that joins
rows, both families of positions.
"""

import queue

import pytest
from helpers.pairwise import one_of_each

import kvalign
from kvalign.app.serve.answers import End, Piece
from kvalign.app.serve.service import Service
from kvalign.app.serve.settings import ServeSettings
from kvalign.app.serve.wire import Chat
from kvalign.models.loading import load_model
from kvalign.streaming.turns import turn_ids

METHODS = [
    *({"method": x} for x in ("kvalign", "streaming-llm", "window", "discard-half", "recompute")),
    {"method": "streaming-llm", "policy": "h2o"},
    {"method": "kvalign", "policy": "keydiff", "num_evicted": "2"},
]
TALKS = (
    ("Who lived there?", "Why?", "And what became of the king?"),
    ("Once upon a time there was an island, far away in the north, and nobody knew of it", "So?"),
    ("A",) * 4,
)


MODELS = ("gpt2-mini", "llama-mini")


@pytest.fixture(scope="module")
def models():
    return {name: load_model(name) for name in MODELS}


def asked(service, turn, name, **more):
    """The queue to which a turn's events come."""
    events = queue.Queue()
    fields = dict(model="any", messages=[{"role": "user", "content": turn}], session=name)
    service.chat(Chat(**fields, temperature=0, max_tokens=6, **more), events.put)
    return events


def text_of(events):
    text = ""
    while not isinstance(event := events.get(timeout=60), End):
        assert isinstance(event, Piece), event
        text += event.text
    return text


@pytest.mark.parametrize(("number", "name"), one_of_each(range(len(METHODS)), MODELS))
def test_sessions_are_their_streams(number, name, models):
    method, loaded = METHODS[number], models[name]
    service = Service(ServeSettings(model=name, cache_size=24, **method), loaded)
    service.start()
    try:
        answers = [[] for _ in TALKS]
        for number in range(max(map(len, TALKS))):
            going = [i for i, turns in enumerate(TALKS) if number < len(turns)]
            waiting = [asked(service, TALKS[i][number], f"s{i}") for i in going]
            for i, events in zip(going, waiting, strict=True):
                answers[i].append(text_of(events))
    finally:
        service.stop()
    for turns, said in zip(TALKS, answers, strict=True):
        stream = kvalign.stream(
            loaded.model,
            loaded.tokenizer,
            cache_size=24,
            **method,
            do_sample=False,
            max_new_tokens=6,
            stop_at_end=True,
        )
        for turn, text in zip(turns, said, strict=True):
            stream.feed(turn_ids(loaded.tokenizer, turn, not stream.ids))
            assert text == "".join(stream)


def test_a_long_prompt_goes_in_by_parts_and_others_go_on(models):
    """Another row is stepped between two parts; what is said is that of a stream."""
    loaded = models["gpt2-mini"]
    service = Service(ServeSettings(model=loaded.spec.name, cache_size=64), loaded)
    service.start()
    order = []
    try:
        short = queue.Queue()
        fields = dict(model="any", temperature=0, max_tokens=40)
        hello = [{"role": "user", "content": "Hello"}]
        service.chat(
            Chat(messages=hello, **fields), lambda e: (order.append("short"), short.put(e))
        )
        assert isinstance(short.get(timeout=60), Piece)  # it is being stepped
        text = "the king of the island had a ship and " * 400
        long = [{"role": "user", "content": text}]
        events = queue.Queue()
        service.chat(Chat(messages=long, **fields), lambda e: (order.append("long"), events.put(e)))
        answer = text_of(events)
    finally:
        service.stop()
    assert order.index("long") > 4
    stream = kvalign.stream(
        loaded.model, loaded.tokenizer, cache_size=64, do_sample=False, max_new_tokens=40
    )
    stream.feed(turn_ids(loaded.tokenizer, text, True))
    assert answer == "".join(stream)
