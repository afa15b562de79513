"""Aligners: what realigns the entries that stay after an eviction. One file a kind; `kinds.py` has
a line each, and the config in an aligner's folder names its kind.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
