"""The report in terminals of several widths: whole numbers, and what is left out is named."""

import io
import re

import pytest
from helpers.results_example import write_folder
from rich.console import Console

from kvalign.app.cli.main import main
from kvalign.eval.protocol.evaluation import Column, Table
from kvalign.eval.report.terminal import fitted, print_tables
from kvalign.foundation.console import Entry

FIGURES = [Entry("84.10"), Entry("1234.56")]
KEYS = ["no repeated n-gram", "ratio"]
WIDE = Table(
    "model",
    [
        Column("method", None),
        Column("least", 2, weight=0),
        Column("ratio", 3, "lower", weight=7),
        Column("perplexity", 2, "lower", weight=6),
        Column("more, of it", 2, weight=1),
    ],
    [
        [Entry(name), Entry("1.23"), Entry("1.016", True, "0.976 to 1.053"), *FIGURES]
        for name in ("window, 4 sinks", "kvalign (kvalign-gpt2-mini-table), 0 sinks")
    ],
)


def printed(table, width):
    out = io.StringIO()
    print_tables([table], Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_where_there_is_room_nothing_is_left_out():
    text = printed(WIDE, 200)
    assert "left out" not in text and "1.016 ★ (0.976 to 1.053)" in text
    assert fitted(WIDE, 200) == (WIDE, [])


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100])
def test_numbers_are_whole_and_what_is_left_out_is_named(width):
    text = printed(WIDE, width)
    shown, left_out = fitted(WIDE, width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for row in shown.rows:
        assert all(entry.line in text for entry in row[1:])
    titles = {column.title for column in shown.columns} | set(left_out)
    assert titles >= {column.title for column in WIDE.columns}
    named = f"left out at {width} columns: {'; '.join(left_out)}"
    assert not left_out or named in " ".join(text.split())


def test_the_least_weight_goes_first_and_the_ratio_stays():
    orders = [fitted(WIDE, width)[1] for width in range(120, 20, -1)]
    assert max(orders, key=len) == ["least", "more, of it", "intervals of ratio", "perplexity"]
    assert "ratio" in [column.title for column in fitted(WIDE, 20)[0].columns]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_what_tells_rows_apart_stays(width):
    def table(*sizes):
        rows = [[Entry("window"), Entry(size), Entry("0.500"), *FIGURES] for size in sizes]
        size = Column("no repeated n-gram", weight=0, is_key=True)
        figures = [Column("ratio", 3, weight=7), Column("least", 2), Column("more", 2)]
        return Table("model", [Column("method", None), size, *figures], rows)

    shown, left_out = fitted(table("0", "2"), width)
    assert [column.title for column in shown.columns[:3]] == ["method", *KEYS]
    assert not set(KEYS) & set(left_out)
    assert fitted(table("2", "2"), 30)[1][0] == KEYS[0]  # it tells nothing apart here


@pytest.mark.parametrize("width", [80, 200])
def test_report_is_as_wide_as_columns_says(width, tmp_path, capsys, monkeypatch):
    folder = write_folder(tmp_path / "results")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["report", str(folder), "--terminal"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert text.index("Findings") < text.index("Summary")
    assert ("left out at 80 columns" in text) is (width == 80)
    perplexities = re.findall(r"\b1[0-5]\.00\b", text)
    assert len(perplexities) >= 6
