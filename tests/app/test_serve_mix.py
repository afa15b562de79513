"""All that clients do, side by side, for a moment."""

import asyncio

import httpx
import pytest
from helpers.live_tensors import live_bytes, no_collections
from helpers.mixed_requests import CHAT, TEXT, Mix
from helpers.patience import PATIENCE_S, until
from helpers.served import serving

MODEL = "llama-mini"


@pytest.mark.slow
def test_a_mix_of_requests(loaded, tmp_path):
    async def ask_all(address):
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as client:
            mix = Mix(client, "llama-mini", seed=0)
            await mix.run(0.5)
        return mix

    limits = dict(cache_size=48, max_sessions=3, max_unnamed=3, sessions=tmp_path, memory=60)
    with serving(loaded, **limits) as server:
        mix = asyncio.run(ask_all(server.address))
        assert not mix.wrong, mix.wrong
        kinds = {name.partition(" ")[0] for name in mix.found}
        assert kinds >= {"turn", "talk", "long", "again", "leave", "many", "refused", "watch"}
        assert not server.service.sessions._busy


@pytest.mark.slow
def test_what_is_answered_leaves_nothing(loaded, tmp_path):
    """Without the garbage collector, which may come hundreds of answers later."""

    async def ask_some(server, name):
        async with httpx.AsyncClient(base_url=server.address, timeout=PATIENCE_S) as client:
            mix = Mix(client, "llama-mini", seed=0)
            turns = [mix.asked("Who? " * 30, session=f"{name}{i}") for i in range(3)]
            text = {"model": "llama-mini", "prompt": "An island " * 200, "n": 2, "max_tokens": 9}
            asking = [mix.ask("turn", CHAT, json=asked) for asked in turns]
            await asyncio.gather(*asking, mix.leave(), mix.ask("text", TEXT, json=text))
            assert mix.found == {"turn 200": 3, "leave 200": 1, "text 200": 1}
        until(lambda: not server.service.engine._batches)

    limits = dict(cache_size=48, memory=60, max_sessions=3, max_unnamed=0, sessions=tmp_path)
    with serving(loaded, **limits) as server, no_collections():
        asyncio.run(ask_some(server, "a"))
        before = live_bytes()
        asyncio.run(ask_some(server, "b"))
        until(lambda: live_bytes() < before + 100_000)  # one cache has more
