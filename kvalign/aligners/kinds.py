"""Kinds of aligner, one line each. The command line, reports and tests read this registry.

The module of the same name in `kvalign.training.kinds` trains a kind. It may also define the
aligner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
