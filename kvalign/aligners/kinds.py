"""Kinds of aligner, one line each, and the sizes of networks, without importing torch. The command
line, reports and tests read the registry.

`kvalign.training.kinds.TRAINERS` has the function that trains each.
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

TARGETS = ("key", "value")
SHARED_SIZES = ("position_dim", "layer_dim", "head_embed_dim")
NETWORK_SIZES = {
    "key_hidden1": 256,
    "key_hidden2": 64,
    "value_hidden1": 64,
    "value_hidden2": 128,
    "position_dim": 32,
    "layer_dim": 8,
    "head_embed_dim": 4,
}
"""Default sizes of realignment networks, which the paper's sweep found for DistilGPT2."""
