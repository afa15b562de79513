"""Many sessions at once against `kvalign serve`, each compared with the same session alone.

    python tests/load.py
    python tests/load.py --models gpt2-mini --sessions 4 --turns 3 --json
    python tests/load.py --minutes 30 --flags="--memory 500"

For each model a server is started; sessions of several turns are held by OpenAI's client, all at
once, then one after the other; then streams without a session are counted by the second. Answers
are greedy. Exit code 1: a transcript differs, or a request failed.

With --minutes there is a mix of all that clients do instead (`helpers/mixed_requests.py`), a
part of the time for each model. Exit code 1: an answer of 500 or above, two answers to one turn,
or memory at rest that grows by more than 5 % in the second half.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
from helpers.mixed_requests import WORDS, Mix

from kvalign.app.serve.engine import GIVE_BACK_S

NUM_PARTS = 6  # of a mix; sessions fill their places in the first half


@contextmanager
def served(model: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of a model: its address, and its process."""
    command = [sys.executable, "-m", "kvalign", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    try:
        if not (address := re.search(r"http\S+", process.stdout.readline())):
            raise RuntimeError("no server listens")
        yield address[0], process
    finally:
        process.kill()
        process.communicate()


def turn_of(session: int, turn: int) -> str:
    """What is said: of other lengths in other sessions and turns."""
    num = 3 + (7 * session + 5 * turn) % 23
    return " ".join(WORDS[(session + turn + i * i) % len(WORDS)] for i in range(num)) + "?"


class Times:
    """Seconds to first tokens, and between two pieces of text."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.between: list[float] = []

    def row(self) -> dict[str, float]:
        found = {}
        for name, seconds in (("first", self.first), ("between", self.between)):
            cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [0.0] * 99
            found |= {f"{name}_p50_ms": 1e3 * cuts[49], f"{name}_p99_ms": 1e3 * cuts[98]}
        return found


async def hold(client, model, name, session, num_turns, num_tokens, times) -> list[str]:
    """One session: what was answered, turn by turn."""
    answers = []
    for turn in range(num_turns):
        messages = [{"role": "user", "content": turn_of(session, turn)}]
        asked = dict(model=model, messages=messages, max_tokens=num_tokens, temperature=0)
        asked["extra_body"] = {"session": f"{name}-{session}"}
        if session % 4 == 3:
            reply = await client.chat.completions.create(**asked)
            answers.append(reply.choices[0].message.content)
            continue
        pieces, last = [], time.perf_counter()
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                now = time.perf_counter()
                (times.between if pieces else times.first).append(now - last)
                last = now
                pieces.append(chunk.choices[0].delta.content)
        answers.append("".join(pieces))
    return answers


async def throughput(client, model: str, num_streams: int, num_tokens: int) -> float:
    """Tokens a second of so many streams at once."""

    async def one(i: int) -> int:
        reply = await client.completions.create(
            model=model, prompt=turn_of(i, 1), max_tokens=num_tokens, temperature=0
        )
        return reply.usage.completion_tokens

    begun = time.perf_counter()
    numbers = await asyncio.gather(*map(one, range(num_streams)))
    return sum(numbers) / (time.perf_counter() - begun)


def memory_mb(process: subprocess.Popen) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


async def sampled(process: subprocess.Popen, every_s: float, sizes: list[float]) -> None:
    while True:
        sizes.append(memory_mb(process))
        await asyncio.sleep(every_s)


async def mixed(model: str, address: str, process: subprocess.Popen, minutes: float) -> dict:
    """Statuses under a mix of requests; resident memory before it, and at rest after each of its
    parts.
    """
    sizes, at_rest = list[float](), [memory_mb(process)]
    base, limits = address.removesuffix("/v1"), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=600, limits=limits) as client:
        mix = Mix(client, model, seed=0)
        watching = asyncio.ensure_future(sampled(process, 2, sizes))
        for _ in range(NUM_PARTS):
            await mix.run(60 * minutes / NUM_PARTS)
            await asyncio.sleep(GIVE_BACK_S + 5)
            at_rest.append(memory_mb(process))
        watching.cancel()
    about = dict(model=model, minutes=minutes, statuses=dict(sorted(mix.found.items())))
    grown_by = at_rest[-1] / at_rest[NUM_PARTS // 2 + 1] - 1
    memory = dict(memory_most_mb=max(sizes), at_rest_mb=at_rest, grown_by=grown_by)
    return about | {"errors": mix.wrong} | memory


async def measure(model: str, address: str, process: subprocess.Popen, args) -> dict:
    """All figures of one model."""
    together, alone, sizes = Times(), Times(), list[float]()
    async with openai.AsyncOpenAI(
        base_url=address, api_key="none", max_retries=0, timeout=600
    ) as client:

        def session(name: str, i: int, times: Times):
            return hold(client, model, name, i, args.turns, args.tokens, times)

        await session("warm", 0, Times())
        watching = asyncio.ensure_future(sampled(process, 0.5, sizes))
        begun = time.perf_counter()
        at_once = await asyncio.gather(
            *(session("many", i, together) for i in range(args.sessions)), return_exceptions=True
        )
        seconds = time.perf_counter() - begun
        watching.cancel()
        errors = [repr(answers) for answers in at_once if isinstance(answers, BaseException)]
        one_by_one = [await session("alone", i, alone) for i in range(args.sessions)]
        differ = [
            i for i, pair in enumerate(zip(at_once, one_by_one, strict=True)) if pair[0] != pair[1]
        ]
        speeds = {
            f"tokens_per_s_{num}": await throughput(client, model, num, args.stream_tokens)
            for num in args.streams
        }
    half = len(sizes) // 2
    about = dict(model=model, sessions=args.sessions, turns=args.turns, errors=errors)
    times = together.row() | {f"alone_{name}": x for name, x in alone.row().items()} | speeds
    most = [max(part, default=0.0) for part in (sizes[:half], sizes[half:])]
    memory = dict(zip(("memory_half_mb", "memory_end_mb"), most, strict=True))
    return about | {"differ": differ, "seconds": seconds} | times | memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="llama-mini,gpt2-mini")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--streams", default="1,8,32", help="of which tokens are counted")
    parser.add_argument("--stream-tokens", type=int, default=200)
    parser.add_argument("--flags", default="", help="further ones of kvalign serve")
    parser.add_argument("--minutes", type=float, help="of a mix of requests, in place of all that")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.streams = [int(num) for num in args.streams.split(",")]
    rows = []
    for model in args.models.split(","):
        with served(model, *args.flags.split()) as (address, process):
            if args.minutes:
                minutes = args.minutes / len(args.models.split(","))
                rows.append(asyncio.run(mixed(model, address, process, minutes)))
            else:
                rows.append(asyncio.run(measure(model, address, process, args)))
    if args.json:
        print(json.dumps({"threads": os.environ.get("OMP_NUM_THREADS"), "rows": rows}, indent=1))
    else:
        for name in rows[0]:
            values = (
                f"{row[name]:.1f}" if isinstance(row[name], float) else row[name] for row in rows
            )
            print(f"{name:22}", *(f"{value!s:>14}" for value in values))
    is_wrong = (row["errors"] or row.get("differ") or row.get("grown_by", 0) > 0.05 for row in rows)
    return int(any(is_wrong))


if __name__ == "__main__":
    sys.exit(main())
