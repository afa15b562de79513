"""The cache of fixed size: what it keeps, and how what it keeps stays right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
