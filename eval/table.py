"""Rows of results as a text table."""

from typing import Any

import pandas as pd

_DIGITS = {"nll_nats": 4, "perplexity": 2, "seconds": 1, "ttft_s": 2, "ms_per_token": 2}
_DIGITS |= {"low": 2, "high": 2, "ratio": 4, "ratio_low": 4, "ratio_high": 4, "drift": 4}
_DIGITS |= {"median_ms": 2, "mean_ms": 2, "p90_ms": 2, "p99_ms": 2}
_LISTS = ("quarters",)


def as_text(rows: list[dict[str, Any]]) -> str:
    """An aligned table with the digits that mean something."""
    table = (
        pd.DataFrame(rows)
        .drop(columns=list(_LISTS), errors="ignore")
        .fillna({"aligner": ""} if "aligner" in rows[0] else {})
    )
    formatters = {
        name: (lambda x, digits=digits: f"{x:.{digits}f}")
        for name, digits in _DIGITS.items()
        if name in table
    }
    return table.to_string(index=False, formatters=formatters)
