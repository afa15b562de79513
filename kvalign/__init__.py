"""KV-Align: endless generation with a KV cache of fixed size, realigned after each eviction.

Shapes are written with one alphabet everywhere:

    B batch      L layers   H KV heads   S slots of a cache
    D head_dim   T tokens fed at once    N rows   V vocabulary
"""

_PUBLIC = {
    "Aligner": "kvalign.aligners",
    "METHODS": "kvalign.methods",
    "StreamingCache": "kvalign.cache",
    "load_model": "kvalign.models",
    "load_stream": "kvalign.stream_file",
    "make_cache": "kvalign.methods",
    "make_method": "kvalign.methods",
    "stream": "kvalign.text_stream",
    "stream_generate": "kvalign.generation",
    "stream_tokens": "kvalign.generation",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    """Import a public name on first use: `import kvalign` and `kvalign --help` need no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvalign' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
