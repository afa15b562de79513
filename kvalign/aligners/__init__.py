"""Aligners: trained parts that realign entries that stay; a line for each kind in `kinds.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
