"""Regions of a model that are compiled once for all its layers: norms, MLPs, products, the rotation
of queries and keys, and what we do with entries.

To compile a whole model takes minutes, since each layer is compiled by itself. Its regions take
seconds: attention between them is a call of a library anyway.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners import entries, table
from kvalign.cache import realign

_ROTATION = "apply_rotary_pos_emb"  # of queries and keys, in the file of a model
_OURS = (entries.write, table.standardised, realign.read_alike)
MOST_SHAPES = 64  # of inputs and weights that a region is compiled for
_OF_PRODUCTS = {"coordinate_descent_tuning": True}  # with it products of one row are fused, too


class Regions:
    """Compiled regions of a model."""

    def __init__(self, model: PreTrainedModel, **options: Any):
        of_products = options
        if not options and model.device.type == "cuda":
            of_products = {"options": _OF_PRODUCTS}

        def compiled(function: Any, multiplies: bool) -> Any:
            return torch.compile(
                function, dynamic=False, **(of_products if multiplies else options)
            )

        modules = [*_regions(model)]
        classes = {type(one): any(x.dim() > 1 for x in _weights(one)) for one in modules}
        forwards = {cls: compiled(cls.forward, multiplies) for cls, multiplies in classes.items()}
        # What is called by which name, in which namespace.
        self._calls: list[tuple[dict[str, Any], str, Any]] = [
            (vars(one), "forward", functools.partial(forwards[type(one)], one)) for one in modules
        ]
        files = {sys.modules[type(one).__module__] for one in model.modules()}
        functions = [(sys.modules[one.__module__], one.__name__) for one in _OURS]
        functions += [(file, _ROTATION) for file in files if hasattr(file, _ROTATION)]
        for file, name in functions:
            self._calls.append((vars(file), name, compiled(getattr(file, name), file is realign)))

    @contextmanager
    def called(self) -> Iterator[None]:
        """Context in which calls of the model call its compiled regions."""
        before = [names.get(name) for names, name, _ in self._calls]
        with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
            try:
                for names, name, call in self._calls:
                    names[name] = call
                yield
            finally:
                for (names, name, _), own in zip(self._calls, before, strict=True):
                    if own is None:
                        del names[name]
                    else:
                        names[name] = own


def _regions(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Children of the model's layers, or of their attention, that take no cache, and have weights
    and the `forward` of their class.
    """
    for layer in model.modules():
        if type(layer).__name__ not in (model._no_split_modules or ()):
            continue
        for child in layer.children():
            takes = inspect.signature(child.forward).parameters
            has_cache = "past_key_values" in takes or "layer_past" in takes
            for one in child.children() if has_cache else [child]:
                if "forward" not in vars(one) and _weights(one):
                    yield one


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
