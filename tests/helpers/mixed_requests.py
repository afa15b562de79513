"""A mix of all that clients do to a server, for minutes: talks in sessions, talks without, long
prompts, turns sent again, clients that leave, bodies of many values, what is refused.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = ["island", "harbour", "winter", "king", "river", "letter", "army", "garden", "window"]
MANY = b'{"model": "m", "messages": [' + b",".join([b"{}"] * 330_000) + b"]}"
REFUSED: tuple[dict[str, Any], ...] = (
    {"content": b"{"},
    {"json": {"messages": []}},
    {"json": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**9}},
    {"json": {"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}},
    {"json": {"messages": [{"role": "user", "content": "a " * 40_000}]}},
)


class Mix:
    """All that is asked of a server of a model.

    Attributes:
        found: how often which kind of request had which status.
        wrong: what should not be.
    """

    def __init__(self, client: httpx.AsyncClient, model: str, seed: int):
        self.client, self.model, self.rng = client, model, random.Random(seed)
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._number = 0

    async def run(self, seconds: float) -> None:
        """Ask all kinds side by side for so long."""
        end = time.monotonic() + seconds
        kinds = (self.talk, self.talk, self.talk, self.untold, self.long, self.again, self.leave)
        clients = [self._client(one, end, 0.2) for one in kinds]
        clients += [self._client(one, end, 3) for one in (self.many, self.refused, self.watch)]
        await asyncio.gather(*clients)

    async def _client(self, one: Callable[[], Any], end: float, most_pause_s: float) -> None:
        while time.monotonic() < end:
            await one()
            await asyncio.sleep(self.rng.random() * most_pause_s)

    async def ask(self, kind: str, path: str, **request: Any) -> httpx.Response:
        """One request that is counted."""
        reply = await self.client.post(path, **request)
        self._count(kind, reply)
        return reply

    def _count(self, kind: str, reply: httpx.Response) -> None:
        self.found[f"{kind} {reply.status_code}"] += 1
        if reply.status_code >= 500:
            self.wrong.append(f"{kind}: {reply.status_code} {reply.text:.200}")

    def said(self, num: int = 6) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, num))) + "?"

    def asked(self, messages: str | list[dict[str, str]], **more: Any) -> dict[str, Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return {"model": self.model, "messages": messages, "max_tokens": 24, **more}

    async def talk(self) -> None:
        """Some turns of a session of its own, streamed or not; now and then it is forgotten."""
        self._number += 1
        name = f"s{self._number}"
        for turn in range(self.rng.randint(1, 6)):
            more: dict[str, Any] = {"session": name, "stream": self.rng.random() < 0.5}
            messages = [{"role": "user", "content": self.said()}]
            if not turn and self.rng.random() < 0.3:
                messages.insert(0, {"role": "system", "content": self.said(9)})
            await self.ask("turn", CHAT, json=self.asked(messages, **more))
        if self.rng.random() < 0.5:
            self._count("forget", await self.client.delete(f"/v1/sessions/{name}"))

    async def untold(self) -> None:
        """A talk that sends all its messages, without a session."""
        messages = []
        for _ in range(3):
            messages.append({"role": "user", "content": self.said()})
            reply = await self.ask("talk", CHAT, json=self.asked(messages))
            if reply.status_code == 200:
                messages.append(reply.json()["choices"][0]["message"])

    async def long(self) -> None:
        asked = {"model": self.model, "prompt": self.said(1500), "max_tokens": 40}
        await self.ask("long", TEXT, json=asked)

    async def again(self) -> None:
        """A turn that is sent twice has one answer."""
        self._number += 1
        asked = self.asked(self.said(), session=f"s{self._number}")
        replies = [await self.ask("again", CHAT, json=asked) for _ in range(2)]
        texts = [x.json()["choices"][0]["message"]["content"] for x in replies if x.is_success]
        if len(set(texts)) > 1:
            self.wrong.append(f"two answers to one turn: {texts}")

    async def leave(self) -> None:
        """A client that goes in the middle of an answer."""
        asked = self.asked(self.said(), stream=True, max_tokens=2000)
        async with self.client.stream("POST", CHAT, json=asked) as reply:
            if reply.status_code == 200:
                lines, num = reply.aiter_lines(), self.rng.randint(1, 9)
                with suppress(StopAsyncIteration):
                    for _ in range(num):
                        await anext(lines)
            else:
                await reply.aread()
            self._count("leave", reply)

    async def many(self) -> None:
        await self.ask("many", CHAT, content=MANY, headers={"Content-Type": "application/json"})

    async def refused(self) -> None:
        await self.ask("refused", CHAT, **self.rng.choice(REFUSED))

    async def watch(self) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            self._count("watch", await self.client.get(path))
