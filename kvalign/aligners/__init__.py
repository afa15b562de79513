"""Aligners: what realigns kept entries after an eviction. One file a kind; the config of an
artifact names its kind.
"""

from kvalign.aligners.base import Aligner, AlignerConfig, new_config, probe
from kvalign.aligners.network import NetworkAligner, RealignNet

__all__ = ["Aligner", "AlignerConfig", "NetworkAligner", "RealignNet", "new_config", "probe"]
