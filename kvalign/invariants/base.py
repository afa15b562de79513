"""Invariants and their outcomes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from kvalign.invariants.subject import EXACT, Subject


@dataclass(frozen=True)
class Measured:
    """Measured figure.

    Attributes:
        figure: holds if it is at most `bound`; the invariant says what it measures.
        note: further information.
    """

    figure: float
    bound: float = EXACT
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.bound  # nan does not


@dataclass(frozen=True)
class Invariant:
    """Property that every streaming cache must have.

    Attributes:
        about: the property in words.
        unit: of the figure.
        look_at: the most likely place of the fault if it fails.
        measure: raises NotApplicableError if there is nothing to measure.
    """

    about: str
    unit: str
    look_at: str
    measure: Callable[[Subject], Measured]


def invariant(
    about: str, *, unit: str = "sd of logits", look_at: str
) -> Callable[[Callable[[Subject], Measured]], Invariant]:
    """Decorator that makes an invariant of a function that measures."""
    return partial(Invariant, about, unit, look_at)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an invariant for one cache and model.

    Attributes:
        name: in `INVARIANTS`.
        figure, bound: the measured figure and its largest allowed value; None if nothing was
            measured.
        note: why it does not apply, the exception, or another figure.
        look_at: for a failure, the most likely place of the fault.
    """

    name: str
    about: str
    state: Literal["passed", "failed", "not applicable"]
    figure: float | None = None
    bound: float | None = None
    unit: str = ""
    note: str = ""
    look_at: str = ""


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors in standard deviations of the second; inf if not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    apart = (actual.float() - expected.float()).abs().max() / expected.float().std()
    return float(apart) if apart.isfinite() else float("inf")
