"""Whether the hub answers: asked once and in seconds, whatever stands in the way."""

import pytest

from kvalign.foundation import hub
from kvalign.models.loading import load_model


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


def test_a_fetched_model_is_one_that_works_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = pytest.raises(ValueError, match=r"smollm2-135m-instruct\? \(kvalign models --fetch")
    with asked as refused:
        load_model("smollm2-135m-instrct")
    assert "recall-llama, or the path" in str(refused.value)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    with pytest.raises(ValueError, match="recall-llama, smollm2-135m-instruct, or the path"):
        load_model("smollm2-135m-instrct")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *[(name, False) for name in ("gpt2", "you/gpt2-1.5b", "elsewhere/x")],
        *[(name, True) for name in ("./gpt2", "/gpt2", "~/gpt2", "a/b/c", "..", "mine/x")],
    ],
)
def test_what_is_a_path(name, is_one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert hub.is_path(name) is is_one
