"""The table of `kvalign verify`."""

from collections import Counter
from collections.abc import Sequence

from kvalign.foundation.console import Heading, print_table
from kvalign.invariants.base import Outcome


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a row an invariant, what to look at of those that failed, and a line that sums up."""
    rows = [
        [
            outcome.name,
            outcome.state,
            _text(outcome.figure),
            _text(outcome.bound),
            outcome.unit,
            outcome.note,
        ]
        for outcome in outcomes
    ]
    headings: list[Heading | str] = [
        "invariant",
        "",
        Heading("figure", True),
        Heading("bound", True),
        "of",
        "note",
    ]
    print_table(headings, rows)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if failed:
        print()
        table = [[outcome.name, outcome.about, outcome.look_at] for outcome in failed]
        print_table(["failed", "what must hold", "what to look at"], table)
    counts = Counter(outcome.state for outcome in outcomes)
    print("\n" + ", ".join(f"{num} {state}" for state, num in counts.items()))


def _text(number: float | None) -> str:
    """`2.1e-06`, `0.31`, `512`, or nothing."""
    if number is None:
        return ""
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.2g}"
