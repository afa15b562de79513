"""The page of the cache: what it takes, and what is written into it."""

import json
from html import unescape

import pytest

from kvalign.app.cli.main import main
from kvalign.app.commands.lanes import LanesSettings
from kvalign.app.pages.lanes import EVICTS, FAMILIES, MAX_CACHE_SIZE, frame, page
from kvalign.methods import make_method
from kvalign.methods.registry import METHODS

HOSTILE = "</script><script>alert(1)</script>"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(method=HOSTILE), "unknown method"),
        (dict(evicts="before", cache_size=4), "got 3, less the new token's place"),
        (dict(cache_size=10**9), f"cache_size must be at most {MAX_CACHE_SIZE}"),
        (dict(num_evicted=5), "num_evicted must be between 1 and the window"),
        (
            dict(memory=9, method="streaming-llm"),
            "memory does not work with streaming-llm on learned positions: use kvalign, or",
        ),
        (dict(memory=9, method="kvalign", num_evicted=2), "leave out policy, positions and num_e"),
        (dict(num_recalled=1), "need a memory: give memory, too"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        page(**wrong)


def test_it_opens_on_kvalign(tmp_path, capsys):
    assert main(["lanes", "--out", str(tmp_path / "cache.html")]) == 0
    source = (tmp_path / "cache.html").read_text()
    data = json.loads(source.split('id="data">')[1].split("</script>")[0])
    assert (data["settings"]["method"], data["settings"]["family"]) == ("kvalign", "learned")


def test_page_holds_what_it_was_asked_for():
    source = page(
        "window",
        cache_size=5,
        num_sinks=9,
        num_evicted=2,
        controls=False,
        family="rotary",
        evicts="before",
    )
    data = json.loads(source.split('id="data">')[1].split("</script>")[0])
    assert data["settings"] == dict(
        method="window",
        family="rotary",
        evicts="before",
        cache_size=5,
        num_sinks=9,
        num_evicted=2,
        memory=0,
        num_recalled=None,
    )
    assert data["controls"] is False and set(data["methods"]) == set(METHODS)
    for found, known, field in (
        (data["families"], FAMILIES, "family"),
        (data["evicts"], EVICTS, "evicts"),
    ):
        choices = LanesSettings.__dataclass_fields__[field].metadata["choices"]
        assert tuple(found) == known == choices
    assert source.count("<script") == 2 and "://" not in source


def test_frame_has_the_sizes_of_a_method(models):
    for sizes, expected in [
        (dict(cache_size=7, num_evicted=2), dict(cache_size=7, num_sinks=4, num_evicted=2)),
        (dict(cache_size=40, num_evicted=30), dict(cache_size=8, num_sinks=4, num_evicted=4)),
        (dict(cache_size=40, num_sinks=30), dict(cache_size=8, num_sinks=7)),
        (dict(cache_size=40, num_sinks=30, memory=99), dict(cache_size=8, num_sinks=6, memory=99)),
    ]:
        found = frame(make_method("streaming-llm", models["llama"], **sizes))
        data = unescape(found).split('id="data">')[1].split("</script>")[0]
        assert json.loads(data)["settings"] == dict(
            method="streaming-llm",
            family="rotary",
            evicts="after",
            num_recalled=None,
            **{"memory": 0, "num_evicted": 1} | expected,
        )
        assert ("8 entries here, in place of 40" in found) == (sizes["cache_size"] > 8)
