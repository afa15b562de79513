"""File of a suite: named commands, and the paper's figures for them."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kvalign.foundation.errors import UserError
from kvalign.foundation.files import checked

OUT = "{out}"  # in a command: the folder of the results, which may be moved


class Step(BaseModel, extra="forbid"):
    """Command of a suite; its output is stored under its name."""

    name: str
    command: str


class PaperTable(BaseModel, extra="forbid"):
    """Figures of the paper, by method and cache size; the suite's `cell` measures `metric`."""

    title: str
    cell: str
    metric: str
    rows: dict[str, dict[int, float]]


class PaperSweep(BaseModel, extra="forbid"):
    """Best trial of a sweep of the paper, which the suite's preparation `cell` (a `kvalign tune`)
    repeats; figures by the names of `kvalign.eval.report.sweeps.FIGURES`.
    """

    cell: str
    best: dict[str, float]


class Paper(BaseModel, extra="forbid"):
    """Statements of the paper about a suite's measurements."""

    source: str = ""
    notes: list[str] = []
    sweeps: list[PaperSweep] = []
    tables: list[PaperTable] = []


class Suite(BaseModel, frozen=True, extra="forbid"):
    """Suite of evaluations, `cells`, and their preparations, `prepare`, in order; `{name}` in a
    command stands for one of `variables`, `{out}` for the folder of the results.
    """

    title: str = ""
    about: str = ""
    variables: dict[str, str] = {}
    prepare: list[Step] = []
    cells: list[Step]
    paper: Paper = Paper()

    def words(self, step: Step, values: dict[str, str]) -> list[str]:
        """A step's command in words, with the values of its variables; {out} stays.

        Raises:
            ValueError: an open quotation, or an unknown variable.
        """

        def value(match: re.Match[str]) -> str:
            if match[1] not in values and match[1] != "out":
                raise ValueError(f"the suite has no variable {match[1]!r}")
            return values.get(match[1], match[0])

        return [re.sub(r"\{(\w+)\}", value, word) for word in shlex.split(step.command)]


def fill_in(command: str, out: Path) -> str:
    """Command with the folder of the results for {out}, as a shell takes it."""
    if OUT not in command:
        return command
    return shlex.join(word.replace(OUT, str(out)) for word in shlex.split(command))


def parse_suite_text(text: str, name: str) -> Suite:
    """Suite that a YAML text describes; UserError, which begins with `name`, if it is invalid."""
    try:
        values: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"suite {name} is not YAML: {' '.join(str(error).split())}") from None
    return checked(Suite, values, f"suite {name}")
