"""KV-Align: endless generation with a KV cache of fixed size, realigned after each eviction.

Shapes use one alphabet everywhere:

    B batch      L layers   H KV heads   S slots of a cache
    D head_dim   T tokens fed at once    N rows   V vocabulary

Public names are imported at first use: `import kvalign` and `kvalign --help` need no torch.
`__init__.pyi` lists the names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
