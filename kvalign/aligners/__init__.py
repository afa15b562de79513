"""Aligners: trained parts that realign the entries that stay after an eviction. Each kind has one
line in `kinds.py`. The config in an aligner's folder names its kind.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
