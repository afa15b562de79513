"""The state of this machine: every check, whatever is missing or broken, and whether KV-Align can
work here.
"""

import itertools
from collections.abc import Callable, Iterator

from kvalign.app.inventory import checks
from kvalign.app.inventory.checks import Check
from kvalign.foundation.console import Heading, print_table

# A group's name, its checks, and whether KV-Align cannot work where a check itself fails.
_PARTS: tuple[tuple[str, Callable[[], Iterator[Check]], bool], ...] = (
    ("packages", checks.packages, True),
    ("devices", checks.devices, True),
    ("machine", checks.machine, False),
    ("hub", checks.hub_and_cache, False),
    ("models", checks.models, True),
    ("aligners", checks.aligners, True),
    ("corpora", checks.corpora, False),
    ("word lists", checks.word_lists, False),
)
_FIT = "all that is required is here"


def examine() -> list[Check]:
    """The checks of every part; a part that fails is one check of its own."""
    results: list[Check] = []
    for group, look, required in _PARTS:
        try:
            results += look()
        except Exception as error:  # whatever a broken package raises when it is used
            fault = f"{type(error).__name__}: {error}"
            todo = "mend what is missing or wrong above"
            results.append(Check(group, group, "wrong", fault, todo, required))
    return results


def is_fit(results: list[Check]) -> bool:
    """Whether all that is required is here and can be used."""
    return all(check.state == "ok" for check in results if check.required)


def show(results: list[Check]) -> None:
    """Print a table a group, and a line that sums them up; states are words, not colours alone."""
    headings: list[Heading | str] = [
        Heading(min_width=len("missing")),
        Heading(min_width=max(len(check.name) for check in results)),
        "",
    ]
    for group, members in itertools.groupby(results, lambda check: check.group):
        rows = [[check.state, check.name, check.message] for check in members]
        print_table(headings, rows, title=group)
        print()
    not_ok = [check for check in results if check.state != "ok"]
    required = [check.name for check in not_ok if check.required]
    fit = f"required, and not ok: {', '.join(required)}" if required else _FIT
    print(f"{fit}; optional, and not ok: {len(not_ok) - len(required)}")
