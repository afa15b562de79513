"""Evaluations, the document of results that each returns, and the report of a folder of them.

    result = kvalign.eval.perplexity(model="gpt2-mini", cache_sizes=[32, 64], num_tokens=500)
    result["rows"][0]["perplexity"]

The functions take their settings as keywords, and `loaded`: a model in place of the named one.
Wrong settings raise `UserError`, before any work. Public names are imported at first use;
`__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
