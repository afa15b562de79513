"""The report in terminals of several widths: whole numbers, and nothing is lost."""

import io
import re

import pytest
from helpers.results_example import write_folder
from rich.console import Console

from kvalign.app.cli.main import main
from kvalign.eval.protocol import Column, Table
from kvalign.eval.report.terminal import print_tables
from kvalign.foundation.console import Entry

FIGURES = [Entry("84.10"), Entry("1234.56")]
WIDE = Table(
    "model",
    [
        Column("method", None),
        Column("least", 2),
        Column("ratio", 3, "lower"),
        Column("perplexity", 2, "lower"),
        Column("more, of it", 2),
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
    assert "1.016 ★ (0.976 to 1.053)" in text and "without" not in text and "·" not in text


def test_where_there_is_little_room_there_are_no_intervals():
    text = printed(WIDE, 100)
    assert "1.016 ★" in text and " to " not in text and "·" not in text
    assert "without intervals, which need more than 100 columns" in text


@pytest.mark.parametrize("width", [30, 40, 60])
def test_where_there_is_less_each_row_is_a_card_and_nothing_is_cut(width):
    text = printed(WIDE, width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    whole = " ".join(text.split())
    for row in WIDE.rows:
        assert all(entry.line in whole for entry in row)


@pytest.mark.parametrize("width", [80, 200])
def test_report_is_as_wide_as_columns_says(width, tmp_path, capsys, monkeypatch):
    folder = write_folder(tmp_path / "results")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["report", str(folder), "--terminal"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert text.index("Verdicts") < text.index("Summary")
    perplexities = re.findall(r"\b1[0-5]\.00\b", text)
    assert len(perplexities) >= 6
