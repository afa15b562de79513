"""Aligners: what realigns kept entries after an eviction. One file a kind; the config of an
artifact names its kind.
"""

from kvalign.aligners.anchored import AnchoredAligner
from kvalign.aligners.base import Aligner, AlignerConfig, Move, new_config, probe
from kvalign.aligners.network import NetworkAligner, RealignNet
from kvalign.aligners.table import TableAligner

__all__ = [
    "Aligner",
    "AlignerConfig",
    "AnchoredAligner",
    "Move",
    "NetworkAligner",
    "RealignNet",
    "TableAligner",
    "new_config",
    "probe",
]
