"""Kinds of aligner, one line each. The command line, reports and tests read this registry.

The module of the same name in `kvalign.training.kinds` trains a kind. It may also define the
aligner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvalign.foundation.registry import Registry

if TYPE_CHECKING:
    from kvalign.aligners.base import Aligner

KINDS: Registry[type[Aligner]] = Registry(
    "aligner kind",
    {
        "network": "kvalign.aligners.network:NetworkAligner",
        "table": "kvalign.aligners.table:TableAligner",
        "anchored": "kvalign.aligners.anchored:AnchoredAligner",
    },
)


def label_of(kind: str, training: Mapping[str, Any]) -> str:
    """Name of an aligner in tables of results: its kind, and its objective unless `mse`.

    Args:
        kind, training: as in `AlignerConfig`.
    """
    parts = (part for part in training.values() if isinstance(part, dict))
    return "-".join(
        [kind, *sorted({str(part.get("objective", "mse")) for part in parts} - {"mse"})]
    )
