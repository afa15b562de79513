"""kill -9 in the middle of sessions: each goes on from its last whole turn, and none is corrupt."""

import asyncio
import random

import openai
import pytest
from load import served, turn_of

NUM_SESSIONS, NUM_KILLS = 16, 10


async def hold(address, name, said, until_turn):
    """Go on with a session until it breaks off; `said` are all its messages, so that an answer that
    was kept and did not arrive is told again.
    """
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        while len(said) < 2 * until_turn:
            asked = {"role": "user", "content": turn_of(int(name[1:]), len(said) // 2)}
            reply = await client.chat.completions.create(
                model="gpt2-mini",
                messages=[*said, asked],
                max_tokens=12,
                temperature=0,
                extra_body={"session": name},
            )
            if said:
                assert reply.usage.prompt_tokens_details.cached_tokens > 0
            said += [asked, {"role": "assistant", "content": reply.choices[0].message.content}]


@pytest.mark.slow
def test_sessions_survive_ten_kills(tmp_path):
    flags = ("--cache-size", "48", "--sessions", str(tmp_path / "talks"))
    draw = random.Random(0)
    talks = {f"s{i}": [] for i in range(NUM_SESSIONS)}

    async def hold_all(address, until_turn, process=None, num_more=0):
        """Hold all sessions; kill the server once they have so many messages more."""
        enough = num_more + sum(map(len, talks.values()))
        tasks = [
            asyncio.ensure_future(hold(address, name, said, until_turn))
            for name, said in talks.items()
        ]
        while process is not None and sum(map(len, talks.values())) < enough:
            await asyncio.sleep(0.001)
            assert not any(task.done() for task in tasks)
        if process is not None:
            process.kill()
        return await asyncio.gather(*tasks, return_exceptions=process is not None)

    with served("gpt2-mini", *flags) as (address, _):
        asyncio.run(hold_all(address, 1))
    for kill in range(NUM_KILLS):
        with served("gpt2-mini", *flags) as (address, process):
            broken = asyncio.run(hold_all(address, 10**9, process, draw.randint(1, 60)))
        assert all(isinstance(one, openai.APIConnectionError) for one in broken), (kill, broken)
    num_turns = max(map(len, talks.values())) // 2 + 1
    with served("gpt2-mini", *flags) as (address, _):
        asyncio.run(hold_all(address, num_turns))
    killed, talks = talks, {name: [] for name in talks}
    with served("gpt2-mini", "--cache-size", "48") as (address, _):
        asyncio.run(hold_all(address, num_turns))
    assert killed == talks
