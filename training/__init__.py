"""Training: aligners of every kind (`kinds.py`), sweeps over the networks' sizes, the import of the
authors' networks, and the reference language models.

`__init__.pyi` lists the public functions, which are imported at first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
