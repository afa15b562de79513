"""Models: loading them, their position encoding and the form of their KV cache."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
