"""Socket for steppers: decode steps that are faster than a call of the model. The core imports none
of them; each is a file of `kvalign.steppers` and a line here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from torch import Tensor

from kvalign.cache.base import FixedSizeCache
from kvalign.foundation.registry import Registry


class Stepper(ABC):
    """Maker of decode steps of one model. `Method`s on the model may share it."""

    @classmethod
    def ready(cls, method: Any) -> Self | None:
        """Stepper for a method that compiles nothing; None if there is none."""
        return None

    @classmethod
    @abstractmethod
    def compiling(cls, method: Any, **options: Any) -> Stepper | None:
        """Stepper that compiles, with options of `torch.compile`; None without a compiler."""

    @abstractmethod
    def logits(self, ids: Tensor, cache: FixedSizeCache) -> Tensor | None:
        """Logits [B, V] float32 after ids [B, T], in the pass that the cache is in; None: the
        stepper does not make this step, and has changed nothing.
        """

    @abstractmethod
    def word_for(self, num_rows: int) -> str | None:
        """Word for its steps of so many rows: compiled, stored, captured; None: it makes none."""

    def is_static(self, cache: Any) -> bool:
        """Return whether a new cache is to have the shapes of a full one from its first token."""
        return False

    def prepare_next(self, cache: FixedSizeCache) -> None:  # noqa: B027
        """Prepare the step after one that was just made, while the device makes that one."""

    def prepare(self, method: Any, num_rows: int) -> bool:
        """Prepare steps of so many rows for this start and later ones, and compile no others;
        return whether there are such steps.
        """
        return False


STEPPERS: Registry[type[Stepper]] = Registry(
    "stepper",
    {
        "captured": "kvalign.steppers.captured:Captured",
        "stored": "kvalign.steppers.stored:Stored",
        "compiled": "kvalign.steppers.compiled:Compiled",
    },
)
"""Steppers, those first that are taken first."""


def ready_stepper(method: Any) -> Stepper | None:
    """The first stepper for a method that compiles nothing."""
    of_each = (STEPPERS[name].ready(method) for name in STEPPERS)
    return next((stepper for stepper in of_each if stepper is not None), None)


def last_logits(call: Any, ids: Tensor, cache: Any, **inputs: Any) -> Tensor:
    """Logits [B, V] float32 after the last of ids [B, T], by a call of a model or of its like."""
    out = call(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)
    return out.logits[:, -1].float()
