"""Cache of fixed size: which entries it keeps, and how they stay right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
