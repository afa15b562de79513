"""Kinds of aligner, one line each. The command line, reports and tests read this registry.

The module of the same name in `kvalign.training.kinds` trains a kind. It may also define the
aligner.
"""

from typing import Any

from kvalign.foundation.registry import Registry

KINDS: Registry[Any] = Registry(
    "aligner kind",
    {
        "network": "kvalign.aligners.network:NetworkAligner",
        "table": "kvalign.aligners.table:TableAligner",
        "table-network": "kvalign.aligners.table_network:TableNetworkAligner",
        "anchored": "kvalign.aligners.anchored:AnchoredAligner",
    },
)
"""Classes under `Aligner` by the names in `AlignerConfig.kind`."""
