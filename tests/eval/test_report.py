"""The report: one page without requests, all text as data, every figure with its command; in
terminals of several widths whole numbers, and nothing is lost.
"""

import base64
import csv
import io
import math
import re
from html.parser import HTMLParser

import pytest
from helpers.result_parts import RESULTS
from helpers.results_example import HEBREW, HOSTILE, documents, write_folder
from helpers.smaller import UNDRAWN
from rich.console import Console

from kvalign.app.cli.main import main
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.judging import WORD_LIST
from kvalign.eval.protocol.data import Column, Table
from kvalign.eval.protocol.tables import best, print_tables
from kvalign.eval.report import Results, Suite, read
from kvalign.eval.report.contents import sections
from kvalign.eval.report.page import render, show
from kvalign.foundation.console import Entry
from kvalign.foundation.errors import escape_controls

SEEN = escape_controls(HOSTILE)


class Page(HTMLParser):
    """Tags, links and visible text of a page."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.links, self.text, self.ids = [], [], "", []
        self._hidden = 0
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        assert not any(name.startswith("on") or name == "src" for name in named)
        if "href" in named:
            self.links.append(named["href"])
        if "id" in named:
            self.ids.append(named["id"])
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data):
        self.text += "" if self._hidden else data


@pytest.fixture(scope="module")
def results():
    return Results(documents(), Suite(title=HOSTILE, about=HOSTILE, cells=[]))


@pytest.fixture(scope="module")
def source(results):
    """Without pictures: test_report_in_browser.py has them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in UNDRAWN.items():
            patch.setattr(name, value)
        return render(results, sections(results))


def test_text_of_models_and_users_is_data(source):
    page = Page(source)
    assert page.tags.count("script") == 1 and "b" not in page.tags
    assert page.text.count(SEEN) >= 10
    assert HEBREW in page.text and "\u202e" not in source and "\x07" not in source
    assert "{{ 7*7 }}" in page.text


def test_nothing_points_outside(source):
    page = Page(source)
    assert all(link.startswith(("#", "data:text/csv")) for link in page.links)
    assert not re.search(r"(url\(|@import|<link|<iframe|<img)", source.replace("url(#", ""))
    assert "default-src 'none'" in source


def test_ids_are_unique_and_links_lead_to_them(source):
    page = Page(source)
    assert len(page.ids) == len(set(page.ids))
    targets = {link[1:] for link in page.links if link.startswith("#")}
    assert targets <= set(page.ids)


def test_every_document_has_its_command_and_rows(source, results):
    page = Page(source)
    links = [link for link in page.links if link.startswith("data:")]
    assert len(links) == len(results.documents)
    for link, document in zip(links, results.documents.values(), strict=True):
        assert escape_controls(document["command"]) in page.text
        table = base64.b64decode(link.partition(",")[2]).decode()
        rows = list(csv.DictReader(io.StringIO(table)))
        assert len(rows) == len(document["rows"])
        assert [row["method"] for row in rows] == [row["method"] for row in document["rows"]]


def test_best_is_marked_in_its_direction(results):
    for one in EVALUATIONS["perplexity"].tables(results.documents["perplexity"]):
        titles = [column.title for column in one.columns]
        perplexity = titles.index("perplexity")
        assert not any(row[perplexity].is_best for row in one.rows)  # their intervals overlap
        assert all(row[perplexity].more == "9.00\N{EN DASH}30.00" for row in one.rows)
    assert best([1, 3], "lower", [None, None]) == best([1, 3], "lower", [(0, 2), None]) == set()
    assert best([1, 3], "", [(0, 2), (2.5, 4)]) == best([1], "lower", [(0, 2)]) == set()
    assert best([1, 3], "lower", [(0, 2), (2.5, 4)]) == {0}
    assert best([1, 3], "higher", [(0, 2), (2.5, 4)]) == {1}
    assert best([1, 3], "lower", [(0, 2), (1.5, 4)]) == set()
    assert best([1, None, 3], "lower", [(0, 2), (0, 9), (2.5, 4)]) == {0}
    assert best([1, 1, 3], "lower", [(0, 2), (0, 2), (2.5, 4)]) == set()
    assert best([1, 3], "lower", [(0.0, math.inf)] * 2) == set()


def test_results_of_ours_are_read_as_they_are_kept():
    """Documents are lines of an archive, and the suite says what else is made of them."""
    found = read(RESULTS / "paper-gpt2-mini")
    assert {"perplexity", "latency"} <= found.documents.keys() and found.suite.title


def test_passages_are_whole(source, results):
    for row in results.documents["readability"]["rows"]:
        page_text = Page(source).text
        assert escape_controls(row["text"]) in page_text


def test_unknown_words_of_a_chunk_are_marked(undrawn):
    """Where the words and the rule of a document are those of this version."""
    document = documents()["readability"]
    assert "<mark>" not in render(Results({"r": document}), [])
    document["word_list"] = WORD_LIST
    page = render(Results({"r": document}), [])
    assert page.count("<mark>qX</mark>") == 16
    assert "<mark>island</mark>" not in page and "<mark>.</mark>" not in page


def test_terminal_shows_strips_and_no_escapes(tmp_path):
    folder = write_folder(tmp_path / "results")
    out = io.StringIO()
    show(folder, Console(file=out, width=200, force_terminal=False))
    text = out.getvalue()
    assert "\x1b" not in text and "\x07" not in text and SEEN[:40] in text
    readable = [c[4] for c in documents()["readability"]["rows"][0]["chunks"]]
    assert "".join("█" if ok else "▂" for ok in readable) in text


FIGURES = [Entry("84.10"), Entry("1234.56")]
COLUMNS = [Column("method", None), Column("least", 2), Column("ratio", 3, "lower")]
COLUMNS += [Column("perplexity", 2, "lower"), Column("more, of it", 2)]
WIDE = Table(
    "model",
    COLUMNS,
    [
        [Entry(name), Entry("1.23"), Entry("1.016", True, "0.976 to 1.053"), *FIGURES]
        for name in ("window, 4 sinks", "kvalign (kvalign-gpt2-mini-table), 0 sinks")
    ],
)


def printed(table, width):
    out = io.StringIO()
    print_tables([table], Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_where_there_is_little_room_there_are_no_intervals():
    text = printed(WIDE, 200)
    assert "1.016 ★ (0.976 to 1.053)" in text and "without" not in text
    text = printed(WIDE, 100)
    assert "1.016 ★" in text and " to " not in text
    assert "without intervals, which need more than 100 columns" in text


@pytest.mark.parametrize("width", [30, 60])
def test_where_there_is_less_each_row_is_a_card_and_nothing_is_cut(width):
    text = printed(WIDE, width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    whole = " ".join(text.split())
    assert all(entry.line in whole for row in WIDE.rows for entry in row)


@pytest.mark.parametrize("width", [80, 200])
def test_report_is_as_wide_as_columns_says(width, tmp_path, capsys, monkeypatch):
    folder = write_folder(tmp_path / "results")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["report", str(folder), "--terminal"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert text.index("Verdicts") < text.index("Perplexity")
    perplexities = re.findall(r"\b1[0-5]\.00\b", text)
    assert len(perplexities) >= 6
