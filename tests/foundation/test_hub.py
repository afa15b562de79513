"""Whether the hub answers: asked once and in seconds, whatever stands in the way."""

import pytest

from kvalign.foundation import hub


@pytest.fixture(autouse=True)
def fresh():
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


@pytest.mark.parametrize(
    "proxy",
    ["not a proxy", "http://127.0.0.1:1", "127.0.0.1:1", "http://[::1", "http://x:y", "://"],
)
def test_behind_a_proxy_that_is_none(proxy, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    assert not hub.is_reachable()
