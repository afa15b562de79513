"""The page of the cache: what it takes, and what is written into it."""

import json
from html import unescape

import pytest

from kvalign.app.cli.main import main
from kvalign.app.pages.lanes import frame, page
from kvalign.methods import make_method

HOSTILE = "</script><script>alert(1)</script>"


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="unknown method"):
        page(method=HOSTILE)


def test_it_opens_on_kvalign(tmp_path, capsys):
    assert main(["lanes", "--out", str(tmp_path / "cache.html")]) == 0
    source = (tmp_path / "cache.html").read_text()
    data = json.loads(source.split('id="data">')[1].split("</script>")[0])
    assert (data["settings"]["method"], data["settings"]["family"]) == ("kvalign", "learned")


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
