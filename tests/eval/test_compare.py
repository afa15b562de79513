"""The comparison page: what a model or a user wrote is shown, never interpreted."""

import json
from html.parser import HTMLParser

from kvalign.cli import main
from kvalign.eval.compare import write

HOSTILE = '<script>alert(1)</script> & "quotes" \u202e right-to-left \x07 bell {{ 7*7 }}'


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.data = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name in ("src", "href", "onload", "onclick") for name, _ in attrs)

    def handle_data(self, data):
        self.data += data


def test_command_writes_table_json_and_page(tmp_path, capsys):
    argv = "eval compare --methods streaming-llm,discard-half --cache-size 16 --num-tokens 20"
    argv = [
        *argv.split(),
        "--max-new-tokens",
        "30",
        "--prompt",
        HOSTILE[:40],
        "--out",
        str(tmp_path),
    ]
    assert main(argv) == 0
    assert "discard-half" in capsys.readouterr().out
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["method"] for row in document["rows"]] == ["streaming-llm", "discard-half"]
    for row in document["rows"]:
        assert row["text"] and row["ms_per_token"] > 0 and row["perplexity"] > 1
    assert (tmp_path / "comparison.html").exists()
    assert main(argv) == 2  # nothing is overwritten unasked
    assert "add --overwrite" in capsys.readouterr().err


def test_text_of_models_and_users_is_escaped(tmp_path):
    row = dict(num_sinks=4, num_evicted=1, perplexity=2.0, ttft_s=0.1, ms_per_token=1.0)
    settings = dict(
        model=HOSTILE, prompt=HOSTILE, corpus=HOSTILE, cache_size=16, max_new_tokens=3, num_tokens=2
    )
    rows = [{"method": "window", "aligner": None, "text": HOSTILE, **row}]
    write({"settings": settings, "environment": {"commit": HOSTILE}, "rows": rows}, tmp_path)
    source = (tmp_path / "comparison.html").read_text()
    page = _Page()
    page.feed(source)
    assert "script" not in page.tags
    assert page.data.count(HOSTILE) >= 4
    assert "http" not in source
