"""Kinds of aligner, one line each, the sizes of networks, and the names of aligners in tables of
results, without importing torch.

`kvalign.training.kinds.TRAINERS` has the function that trains each.
"""

from collections.abc import Mapping
from typing import Any

from kvalign.foundation.names import Registry

KINDS: Registry[Any] = Registry(
    "aligner kind",
    {
        "network": "kvalign.aligners.network:NetworkAligner",
        "table": "kvalign.aligners.table:TableAligner",
        "table-network": "kvalign.aligners.table:TableNetworkAligner",
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


def label_of(kind: str, training: Mapping[str, Any]) -> str:
    """Name of an aligner in tables of results: its kind, its objective unless `mse`, and what it
    corrects unless that is all: `table-kl`, `network: keys`, `network: nothing`.

    Args:
        kind, training: as in `AlignerConfig`.
    """
    parts = {kv: part for kv in TARGETS if isinstance(part := training.get(kv), dict)}
    objectives = {str(part.get("objective", "mse")) for part in parts.values()}
    name = "-".join([kind, *sorted(objectives - {"mse"})])
    targets = [f"{kv}s" for kv, part in parts.items() if part.get("used", True)]
    is_all = not parts or len(targets) == len(TARGETS)
    return name if is_all else f"{name}: {' '.join(targets) or 'nothing'}"


def often(name: str, every: int) -> str:
    """Name of an aligner that moves entries once in `every` evictions: `table-every-8: keys`."""
    first, colon, targets = name.partition(": ")
    return name if every == 1 else f"{first}-every-{every}{colon}{targets}"


def note_of_use(folder: object, model: str) -> str:
    """Line that says that an aligner was found where it was trained, for want of a shipped one."""
    return f"using {folder}, trained here: none ships for {model}"
