"""Tensors that stay usable after a pass of the model, in every autograd mode of the caller."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_autograd_modes() -> Iterator[None]:
    """Context or decorator: tensors made within it can be written and read anywhere.

    A tensor made within `torch.inference_mode` cannot be written outside it, nor read where
    gradients are recorded. A tensor made with gradients keeps the graph of its passes alive.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
