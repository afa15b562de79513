"""What a server says of the cache of a session."""

import json

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.served import serving

from kvalign.methods.base import Method

MODEL = "llama-mini"
TURNS = ["Who lived on the island ?", "What did the old captain say to his men ?", "And then ?"]
MEMORY = dict(memory=30, num_recalled=8, method="streaming-llm")


def asked(server, text, session="a", **more):
    said = {"messages": [{"role": "user", "content": text}], "session": session}
    asked = dict(model=MODEL, max_tokens=20, temperature=0, **said, **more)
    reply = httpx.post(f"{server.address}/v1/chat/completions", json=asked, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def view(server, session="a", **how):
    address = f"{server.address}/v1/sessions/{session}/cache"
    return httpx.get(address, params=how, timeout=PATIENCE_S)


def numbers(spans):
    return [x for start, stop in spans for x in range(start, stop)]


def stored(server, session="a") -> tuple[list[int], Method]:
    """Tokens of a session, and its method."""
    session = server.service.sessions.known(session)
    method = server.service._method_for(session.num_sinks)
    method.restore(session.state)
    return session.ids.tolist(), method


@pytest.mark.parametrize(
    "how",
    [
        dict(method="streaming-llm", num_sinks="3"),
        dict(method="streaming-llm", num_evicted=5),
        dict(method="streaming-llm", policy="key-norm"),
        dict(method="streaming-llm", evict="turns"),
        dict(method="discard-half"),
        MEMORY,
    ],
    ids=str,
)
def test_spans_are_what_the_cache_holds(how, loaded):
    with serving(loaded, cache_size=40, **how) as server:
        for number, text in enumerate(TURNS):
            usage = asked(server, text)["usage"]
            told = view(server, since=number).json()
            held, aside = numbers(told["held"]), numbers(told["in_memory"])
            ids, method = stored(server)
            num_fed = len(ids) - 1
            assert told["num_tokens"] == usage["total_tokens"] == len(ids)
            assert [len(held), len(aside)] == [told["num_held"], told["num_in_memory"]]
            assert told["num_evicted"] == num_fed - len(held)
            assert not {*held} & {*aside} and held[-1] == num_fed - 1
            assert len(told["texts"]) == len(ids) - number and told["since"] == number
            if how == MEMORY:
                assert len(held) == (num_fed if num_fed <= 40 else 40 - 8), "8 are taken back"
                assert len(aside) == min(30, num_fed - len(held))
                assert method.num_forgotten(num_fed) == num_fed - len(held) - len(aside)
                continue
            assert not aside
            if "turns" in how.values():
                kept = [ids[x] for x in held]
                assert len(kept) == method.fill and kept[-5:] == ids[-6:-1]
            elif how["method"] == "streaming-llm":
                assert held == sorted({*method.cache.index().flatten().tolist()})
            else:
                assert len(held) == method.fill
        assert num_fed > 40
        assert "".join(told["texts"]).split()[-3:] == loaded.tokenizer.decode(ids).split()[-3:]


def test_what_is_not_there_is_refused(loaded, tmp_path):
    with serving(loaded, cache_size=40, sessions=tmp_path) as server:
        assert view(server).json()["error"]["code"] == "session_not_found"
        asked(server, TURNS[0])
        one = view(server).json()
        assert one["num_evicted"] == 0 and one["num_bytes"] > 0 and one["since"] == 0
        assert view(server, since=10**6).json()["texts"] == []
        assert view(server, since="x").status_code == 400
        (path,) = tmp_path.glob("[!.]*.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
        assert view(server).json()["error"]["code"] == "session_damaged"
        (model,) = httpx.get(f"{server.address}/v1/models").json()["data"]
        assert model["kvalign"]["cache_size"] == 40 and model["kvalign"]["edit"] is False


def told(server, text, **how):
    """What the events of a stream tell of the cache after each token, and its usage."""
    said = {"messages": [{"role": "user", "content": text}], "session": "a", "stream": True}
    more = dict(include_cache=True, include_usage=True)
    asked = dict(model=MODEL, max_tokens=20, temperature=0, stream_options=more, **said, **how)
    address = f"{server.address}/v1/chat/completions"
    lines = httpx.post(address, json=asked, timeout=PATIENCE_S).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["kvalign"] for choice in choices if "kvalign" in choice], events[-1]["usage"]


@pytest.mark.parametrize(
    "how", [dict(method="streaming-llm"), dict(evict="turns"), MEMORY], ids=str
)
def test_a_stream_tells_what_is_held_and_taken_back(how, loaded, monkeypatch):
    monkeypatch.setattr("kvalign.app.serve.turn.PAUSE_S", 0)
    with serving(loaded, cache_size=40, **how) as server:
        for text in TURNS:
            tokens, usage = told(server, text)
            last = view(server).json()
            num = usage["total_tokens"]
            first = num - usage["completion_tokens"] + 1
            assert [one["num_tokens"] for one in tokens] == [*range(first, num + 1)]
            one = tokens[-1]
            recalled = one.pop("recalled")
            assert one == {name: last[name] for name in one}
            if how == MEMORY and one["num_evicted"]:
                aside = {*numbers(tokens[-2]["in_memory"])}
                assert {token for token, _ in recalled} <= aside and len(recalled) >= 8
                heads = 2 * loaded.spec.num_kv_heads  # of two layers
                assert sum(count for _, count in recalled) == 8 * heads
            elif how != MEMORY:
                assert recalled == []
        assert one["num_evicted"] > 0
