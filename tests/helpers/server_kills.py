"""kill -9 of a server in the middle of sessions: each goes on from its last whole turn."""

import asyncio
import random
from pathlib import Path
from typing import Any

import openai

from helpers.served import served, serving, turn_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import LOCK
from kvalign.models.loading import load_model
from kvalign.streaming import memory_file, stream_file

MODEL = "gpt2-mini"


async def _hold(address, name, said, until_turn):
    """Go on with a session until it breaks off; `said` are all its messages, so that an answer that
    was kept and did not arrive is told again.
    """
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        while len(said) < 2 * until_turn:
            asked = {"role": "user", "content": turn_of(int(name[1:]), len(said) // 2)}
            how = dict(max_tokens=8, temperature=0, extra_body={"session": name})
            create = client.chat.completions.create
            reply = await create(model=MODEL, messages=[*said, asked], **how)
            if said:
                assert reply.usage.prompt_tokens_details.cached_tokens > 0
            said += [asked, {"role": "assistant", "content": reply.choices[0].message.content}]


async def _hold_all(talks, address, until_turn, process=None, num_more=0):
    """Hold all sessions; kill the server once they have so many messages more."""
    enough = num_more + sum(map(len, talks.values()))
    tasks = [
        asyncio.ensure_future(_hold(address, name, said, until_turn))
        for name, said in talks.items()
    ]
    while process is not None and sum(map(len, talks.values())) < enough:
        await asyncio.sleep(0.005)
        assert not any(task.done() for task in tasks)
    if process is not None:
        process.kill()
    return await asyncio.gather(*tasks, return_exceptions=process is not None)


def damage(path: Path) -> str:
    """What is wrong with a file; "" for nothing."""
    try:
        stream_file.read(path)
    except UserError as error:
        return str(error)
    return ""


def _memory_of(path: Path) -> list[str]:
    file = stream_file.about(path).memory_file
    return [] if file is None else [memory_file.path_of(path, file.number).name]


def attack_sessions(
    folder: Path, num_kills: int, rng: random.Random, num_sessions: int = 16, **more: Any
) -> dict[str, Any]:
    """Kill a server that keeps its sessions in a folder so many times, while all of them are held;
    `more` are settings of it. The last that goes on with them is in this process.

    Returns:
        kills, files corrupt, sessions lost or left over, and whether all said the same as sessions
        that were left alone.
    """
    settings: dict[str, Any] = {"cache_size": 48, "sessions": folder, **more}
    flags = [f"--{name.replace('_', '-')}={x}" for name, x in settings.items()]
    talks: dict[str, list] = {f"s{i}": [] for i in range(num_sessions)}
    found: dict[str, Any] = {"command": "serve", "kills": 0, "corrupt": [], "lost": []}
    names = set[str]()
    for _ in range(num_kills):
        with served(MODEL, *flags) as (address, process):
            if not names:
                asyncio.run(_hold_all(talks, address, 1))
                names = {path.name for path in folder.glob("[!.]*.safetensors")}
            num_more = rng.randint(1, 4 * num_sessions)
            broken = asyncio.run(_hold_all(talks, address, 10**9, process, num_more))
        assert all(isinstance(one, openai.APIConnectionError) for one in broken), broken
        found["kills"] += 1
        there = list(folder.glob("[!.]*.safetensors"))
        found["corrupt"] += [wrong for path in there if (wrong := damage(path))]
        found["lost"] += sorted(names - {path.name for path in there})
    num_turns = max(map(len, talks.values())) // 2 + 1
    undisturbed: dict[str, list] = {f"u{i}": [] for i in range(num_sessions)}
    with serving(load_model(MODEL), **settings) as server:
        asyncio.run(_hold_all(talks, address := f"{server.address}/v1", num_turns))
        expected = names | {name for one in names for name in _memory_of(folder / one)}
        found["left_over"] = sorted({path.name for path in folder.iterdir()} ^ {LOCK, *expected})
        asyncio.run(_hold_all(undisturbed, address, num_turns))
    return found | {"same_result": [*talks.values()] == [*undisturbed.values()]}
