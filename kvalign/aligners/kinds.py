"""The kinds of aligner: a line each. The command line, reports and tests read this registry.

How a kind is trained says the module of its name in `kvalign.training.kinds`, which may define the
aligner, too.
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
