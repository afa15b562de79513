"""Rows of results as a text table."""

from typing import Any

import pandas as pd

_DIGITS = {"nll_nats": 4, "perplexity": 2, "seconds": 1, "ttft_s": 2, "ms_per_token": 2}


def as_text(rows: list[dict[str, Any]]) -> str:
    """An aligned table with the digits that mean something."""
    table = pd.DataFrame(rows).fillna({"aligner": ""} if "aligner" in rows[0] else {})
    formatters = {
        name: (lambda x, digits=digits: f"{x:.{digits}f}")
        for name, digits in _DIGITS.items()
        if name in table
    }
    return table.to_string(index=False, formatters=formatters)
