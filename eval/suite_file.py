"""The file of a suite: named commands, and the paper's figures that belong to them."""

from typing import Any

import yaml
from pydantic import BaseModel

from kvalign.errors import UserError
from kvalign.files import checked


class Step(BaseModel):
    """One command of a suite; what it prints is kept under its name."""

    name: str
    command: str


class PaperTable(BaseModel):
    """Figures of the paper, by method and cache size; the suite's `cell` measures the same, as the
    column `metric` of its rows.
    """

    title: str
    cell: str
    metric: str
    rows: dict[str, dict[int, float]]


class Paper(BaseModel):
    """What the paper says of what a suite measures."""

    source: str = ""
    notes: list[str] = []
    tables: list[PaperTable] = []


class Suite(BaseModel, frozen=True):
    """A suite: `cells` are its evaluations, `prepare` what they need, in order."""

    title: str = ""
    about: str = ""
    prepare: list[Step] = []
    cells: list[Step]
    paper: Paper = Paper()


def parse_suite_text(text: str, name: str) -> Suite:
    """The suite that a YAML text describes; `name` is that of the suite or its file, for messages.

    Raises:
        UserError: it is no YAML, or a field is missing or wrong; the message names it.
    """
    try:
        values: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"suite {name} is not YAML: {' '.join(str(error).split())}") from None
    return checked(Suite, values, f"suite {name}")
