"""Models: load one, and know how it encodes positions and what its KV cache looks like."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
