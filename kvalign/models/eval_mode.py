"""Eval mode for a model in training, or with fresh PEFT layers: it streams without dropout."""

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import nn

log = logging.getLogger(__name__)


@contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the modules are in eval mode. Afterwards each is in its former mode. If that
    changes one, a line is logged, once.
    """
    trained = [*filter(attrgetter("training"), modules)]
    if trained:
        _say()
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


@functools.cache
def _say() -> None:
    log.warning(
        "the model is in training mode, at least in part: a stream runs it in eval mode, without "
        "dropout, and then restores the mode (model.eval() avoids this line)"
    )
