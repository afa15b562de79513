"""Stored steps that are run as they are written, which takes no compiler."""

import torch

from kvalign.models import attention
from kvalign.steppers import stored


def not_compiled(monkeypatch, exported=False) -> list[int]:
    """Have stored steps run uncompiled, as they are written or as they are exported to a compiler;
    return a list of the number of rows of each that is run.
    """
    found = []

    def load(step, inputs, makes):
        attention.install(step.model.config)
        if exported:
            dims = stored._dims(step.model, inputs)
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
