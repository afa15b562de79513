"""Bodies of many small values cost `kvalign serve` little, in time, memory and for the others."""

import json
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.served import served

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.wire import ChatRequest, Completion, parsed


def filled(before, piece, after, size=10**6):
    """A body of about a megabyte: the same piece again and again between two ends."""
    return f"{before}{','.join([piece] * (size // (len(piece) + 1)))}{after}".encode()


def chat(piece, size=10**6):
    return filled('{"model":"gpt2-mini","messages":[', piece, "]}", size)


def text(piece, size=10**6):
    return filled('{"model":"gpt2-mini","prompt":[', piece, "]}", size)


MANY = {
    "messages: {}": (ChatRequest, chat("{}")),
    "messages: whole": (ChatRequest, chat('{"role":"user","content":""}')),
    "content: {}": (ChatRequest, chat('{"role":"user","content":[{},{},{},{},{},{},{},{},{},{}]}')),
    "prompt: {}": (Completion, text("{}")),
    "prompt: mixed": (Completion, text('1,"a"')),
    "fields": (ChatRequest, json.dumps(dict.fromkeys(range(90_000), 1)).encode()),
}

QUICK = ("messages: whole", "prompt: mixed")


@pytest.mark.parametrize(
    "what", [pytest.param(x, marks=pytest.mark.slow if x not in QUICK else ()) for x in MANY]
)
def test_the_first_fault_ends_it(what):
    kind, body = MANY[what]
    begun = time.process_time()
    with pytest.raises(RequestError) as caught:
        parsed(kind, body, {})
    assert time.process_time() - begun < 1.5  # 3 s and more where all faults are looked for
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            parsed(kind, body, {})
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and len(caught.value.message) < 200


@pytest.mark.slow
def test_health_is_told_while_they_are_read():
    """Two rounds of 8: one that is waited for takes a half."""
    asked = dict(content=MANY["messages: {}"][1], headers={"Content-Type": "application/json"})
    with (
        served("gpt2-mini", "--cache-size", "48") as (address, _),
        httpx.Client(base_url=address.removesuffix("/v1"), timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        client.get("/health")
        begun, slowest = time.perf_counter(), 0.0
        sent = [pool.submit(client.post, "/v1/chat/completions", **asked) for _ in range(16)]
        while not all(one.done() for one in sent):
            before = time.perf_counter()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - before)
        assert slowest < max(0.5, (time.perf_counter() - begun) / 4)
    assert {one.result().status_code for one in sent} == {400}
