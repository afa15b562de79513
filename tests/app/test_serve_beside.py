"""A second method that streams beside that of a server."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.served import serving

from kvalign.app.serve.server import build
from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError

MODEL = "llama-mini"


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ("nothing", "method"),
        ("window:x", "METHOD:CACHE_SIZE"),
        ("window:0", "cache_size|cache-size"),
    ],
)
def test_what_cannot_stream_beside_is_refused(beside, message, loaded):
    with pytest.raises(UserError, match=message):
        build(ServeSettings(model=MODEL, cache_size=48, beside=beside), loaded)


def test_a_method_beside_answers_as_alone(loaded):
    """Its rows are stepped by the same loop, at the same time."""
    asked = dict(model=MODEL, prompt="In the year", temperature=2, top_p=1, seed=3, max_tokens=60)
    how = dict(method="streaming-llm", memory=40, cache_size=48)
    with serving(loaded, beside="discard-half:32", **how) as server, ThreadPoolExecutor(2) as pool:
        two = [f"{server.address}{x}/v1/completions" for x in ("", "/beside")]
        post = partial(httpx.post, json=asked, timeout=PATIENCE_S)
        texts = [reply.json()["choices"][0]["text"] for reply in pool.map(post, two)]
        (model,) = httpx.get(f"{server.address}/v1/models").json()["data"]
        assert model["kvalign"]["beside"]["method"] == "discard-half, cache of 32 entries, 4 sinks"
    for text, own in zip(texts, (how, dict(method="discard-half", cache_size=32)), strict=True):
        with serving(loaded, **own) as server, server.client() as client:
            assert client.completions.create(**asked).choices[0].text == text
    assert texts[0] != texts[1]
