"""Tensors that outlive a pass of the model, whoever calls it in whichever mode of autograd."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lasting() -> Iterator[None]:
    """Let what is made within, or in a decorated function, be written and read anywhere.

    A tensor that is made within `torch.inference_mode` may not be written outside, nor read where
    gradients are kept; one that is made where they are holds on to the passes that it comes from.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
