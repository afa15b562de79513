"""Stored steps that are run as they are written, which takes no compiler."""

import torch

from kvalign.models import attention
from kvalign.steppers import stored


def not_compiled(monkeypatch, exported=False) -> list[int]:
    """Have stored steps run uncompiled, as they are written or as they are exported to a compiler;
    return a list of the number of rows of each that is run.
    """
    found = []

    def load(model, inputs, weights, makes):
        attention.install(model.config)
        step = stored._Step(model, inputs[4].dtype == torch.int8)
        if exported:
            dims = stored._dims(model, inputs)
            step = torch.export.export(
                step, tuple(inputs), strict=False, dynamic_shapes=dims
            ).module()

        @torch.no_grad()
        def run(inputs):
            found.append(len(inputs[0]))
            return [step(*inputs)]

        return run

    monkeypatch.setattr(stored, "load_or_make", load)
    return found
