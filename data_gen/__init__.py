"""Texts for training and evaluation, and recordings of KV caches before and after an eviction.

Public names are imported at first use; `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
