"""The state of this machine: every check, whatever is missing or broken, and whether all that is
required is there.
"""

from collections.abc import Callable, Iterator

from kvalign.app import checks
from kvalign.app.checks import Check
from kvalign.app.listing import one_line

# Heading, what looks, and whether KV-Align cannot work where looking itself fails.
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


def examine() -> list[Check]:
    """Everything that was looked for; a part that fails is one line of its own."""
    found: list[Check] = []
    for group, look, required in _PARTS:
        try:
            found += look()
        except Exception as error:  # whatever a broken package raises when it is used
            what = f"{type(error).__name__}: {error}"
            todo = "mend what is missing or wrong above"
            found.append(Check(group, group, "wrong", what, todo, required))
    return found


def is_fit(found: list[Check]) -> bool:
    """Whether all that is required is there and can be used."""
    return all(check.state == "ok" for check in found if check.required)


def as_text(found: list[Check]) -> str:
    """A table by group, and a line that sums it up; its marks are words."""
    width = max(len(check.name) for check in found)
    lines: list[str] = []
    group = ""
    for check in found:
        if check.group != group:
            group = check.group
            lines += ["", group] if lines else [group]
        what = f"{check.found}: {check.todo}" if check.todo else check.found
        lines.append(f"  {check.state:7}  {one_line(check.name):{width}}  {one_line(what)}")
    not_ok = [check for check in found if check.state != "ok"]
    broken = [check.name for check in not_ok if check.required]
    fit = f"required, and not ok: {', '.join(broken)}" if broken else "all that is required is here"
    return "\n".join([*lines, "", f"{fit}; optional, and not ok: {len(not_ok) - len(broken)}"])
