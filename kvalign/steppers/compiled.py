"""Model that `torch.compile` has compiled, while it is the model that was compiled."""

import functools
import logging
from typing import Any, final

from torch import nn

from kvalign.models.snapshot import Code

log = logging.getLogger(__name__)

OTHER_CODE = (
    "the model has other hooks, or another forward in a class, than when its step was compiled: "
    "its steps are not compiled"
)


@final
class Compiled:
    """Compiled model. PyTorch compiles again what changes, except for hooks and the `forward` of a
    class: with others than at its first call the model is called instead.
    """

    def __init__(self, model: nn.Module, compiled: Any):
        self.model, self.compiled = model, compiled

    @functools.cached_property
    def _code(self) -> Code:
        return Code(self.model)

    def __call__(self, **inputs: Any) -> Any:
        if self._code.holds():
            return self.compiled(**inputs)
        _say()
        return self.model(**inputs)


@functools.cache
def _say() -> None:
    log.warning(OTHER_CODE)
