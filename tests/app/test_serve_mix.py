"""All that clients do, side by side, for a moment; `tests/load.py --minutes 30` is the long run."""

import asyncio

import httpx
import pytest
from helpers.mixed_requests import Mix
from helpers.patience import PATIENCE_S
from helpers.served import serving

from kvalign.models.loading import load_model


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(memory=60), dict(lookup=8)], ids=str)
def test_a_mix_of_requests(more, tmp_path):
    async def ask_all(address):
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as client:
            mix = Mix(client, "llama-mini", seed=0)
            await mix.run(5)
        return mix

    limits = dict(cache_size=48, max_sessions=3, max_unnamed=3, sessions=tmp_path, **more)
    with serving(load_model("llama-mini"), **limits) as server:
        mix = asyncio.run(ask_all(server.address))
        assert not mix.wrong, mix.wrong
        kinds = {name.partition(" ")[0] for name in mix.found}
        assert kinds >= {"turn", "talk", "long", "again", "leave", "many", "refused", "watch"}
        assert not server.service.sessions._busy
