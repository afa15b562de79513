"""Bodies of many small values cost `kvalign serve` little, in time, memory and for the others."""

import asyncio
import subprocess
import sys
import time
import tracemalloc

import httpx
import pytest
from helpers.patience import PATIENCE_S
from load import memory_mb, served

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.wire import Chat, Completion, parsed

MOST_VALUES = 4 * 32768  # as the default of --max-prompt-tokens has it
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def filled(before, piece, after, size=10**6):
    """A body of about a megabyte: the same piece again and again between two ends."""
    return f"{before}{','.join([piece] * (size // (len(piece) + 1)))}{after}".encode()


def chat(piece, size=10**6):
    return filled('{"model":"gpt2-mini","messages":[', piece, "]}", size)


def text(piece, size=10**6):
    return filled('{"model":"gpt2-mini","prompt":[', piece, "]}", size)


MANY = {
    "messages: {}": (Chat, chat("{}")),
    "messages: whole": (Chat, chat('{"role":"user","content":""}')),
    "content: {}": (Chat, chat('{"role":"user","content":[{},{},{},{},{},{},{},{},{},{}]}')),
    "prompt: {}": (Completion, text("{}")),
    "prompt: texts": (Completion, text('""')),
    "prompt: mixed": (Completion, text('1,"a"')),
    "fields": (
        Chat,
        ("{" + ",".join(f'"{i}":1' for i in range(90_000)) + "}").encode(),
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_the_first_fault_ends_it(what):
    kind, body = MANY[what]
    begun = time.process_time()
    with pytest.raises(RequestError) as caught:
        parsed(kind, body, None, MOST_VALUES)
    assert time.process_time() - begun < 1.5  # 3 s and more where all faults are looked for
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            parsed(kind, body, None, MOST_VALUES)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and len(caught.value.message) < 200


def test_what_is_in_texts_is_not_counted():
    said = '{}[],\\"\\\\' * 100_000
    body = f'{{"model":"m","messages":[{{"role":"user","content":"{said}"}}]}}'.encode()
    assert parsed(Chat, body, None, 100).messages[0].content == '{}[],"\\' * 100_000
    ids = list(range(1000))
    assert parsed(Completion, f'{{"model":"m","prompt":{ids}}}'.encode(), None, 2000).prompt == ids
    with pytest.raises(RequestError, match="more than 900"):
        parsed(Completion, f'{{"model":"m","prompt":{ids}}}'.encode(), None, 900)


# Beside the client, whose own work would be counted: seconds of the slowest of many, and how many.
WATCH = """
import sys, threading, time, httpx
waits, ended = [], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
with httpx.Client(base_url=sys.argv[1], timeout=300) as client:
    client.get("/health")
    print("begun", flush=True)
    while not ended.wait(0.005):
        begun = time.perf_counter()
        assert client.get("/health").status_code == 200
        waits.append(time.perf_counter() - begun)
print(max(waits), len(waits))
"""


@pytest.mark.slow
def test_others_do_not_wait_for_them():
    """`/health` while 32 such bodies are read, a few times over."""
    bodies = [(CHAT if kind is Chat else TEXT, body) for kind, body in MANY.values()]

    async def attack(address):
        statuses = []

        async def send(client, i):
            path, body = bodies[i % len(bodies)]
            json = {"Content-Type": "application/json"}
            statuses.append((await client.post(path, content=body, headers=json)).status_code)

        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as client:
            for _ in range(3):
                await asyncio.gather(*(send(client, i) for i in range(32)))
        return statuses

    with served("gpt2-mini", "--cache-size", "48") as (address, process):
        address = address.removesuffix("/v1")
        command = [sys.executable, "-c", WATCH, address]
        watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert watch.stdout.readline() == "begun\n"
        before_mb = memory_mb(process)
        begun = time.perf_counter()
        statuses = asyncio.run(attack(address))
        seconds = time.perf_counter() - begun
        slowest, num = watch.communicate()[0].split()
        more_mb = memory_mb(process) - before_mb
        assert process.poll() is None
    print(f"/health: {num} times, at most {1e3 * float(slowest):.0f} ms, {more_mb:.0f} MB more")
    assert set(statuses) == {400}
    assert float(slowest) < max(0.2, seconds / 6)  # a round that is waited for takes a third
    assert more_mb < 150
