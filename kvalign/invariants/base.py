"""Invariants, and what comes out of one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from kvalign.invariants.subject import EXACT, Subject


@dataclass(frozen=True)
class Measured:
    """A measured figure.

    Attributes:
        figure: holds if it is at most `bound`; what it is of is said by the invariant.
        note: what else is worth knowing.
    """

    figure: float
    bound: float = EXACT
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.bound  # nan does not


@dataclass(frozen=True)
class Invariant:
    """One thing that every cache must keep to.

    Attributes:
        about: what must hold.
        unit: what the figure is.
        look_at: where the fault is most likely if it does not hold.
        measure: raises NotApplicableError where there is nothing to measure.
    """

    about: str
    unit: str
    look_at: str
    measure: Callable[[Subject], Measured]


def invariant(
    about: str, *, unit: str = "sd of logits", look_at: str
) -> Callable[[Callable[[Subject], Measured]], Invariant]:
    """Stands above a function that measures, and makes an invariant of it."""
    return partial(Invariant, about, unit, look_at)


@dataclass(frozen=True)
class Outcome:
    """An invariant of one cache and model.

    Attributes:
        name: in `INVARIANTS`.
        figure, bound: what was measured and what it may be at most; None where nothing was.
        note: why it does not apply, what was raised, what else was measured.
        look_at: of one that failed, where the fault is most likely.
    """

    name: str
    about: str
    state: Literal["passed", "failed", "not applicable"]
    figure: float | None = None
    bound: float | None = None
    unit: str = ""
    note: str = ""
    look_at: str = ""


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors in standard deviations of the second; inf where there
    is no number.
    """
    if found.shape != expected.shape:
        return float("inf")
    apart = (found.float() - expected.float()).abs().max() / expected.float().std()
    return float(apart) if apart.isfinite() else float("inf")
