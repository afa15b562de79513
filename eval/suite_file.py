"""The file of a suite: named commands, and what the paper reports, as YAML that people write."""

from typing import Any

from pydantic import BaseModel

from kvalign.errors import UserError
from kvalign.files import checked


class Step(BaseModel):
    """One command, by a name that is unique in the suite."""

    name: str
    command: str


class Suite(BaseModel):
    """A suite of evaluations.

    Attributes:
        prepare: what cells need, run first and in order.
        cells: evaluations, each a document of the report.
        paper: figures of the paper for the report.
    """

    title: str = ""
    about: str = ""
    prepare: list[Step] = []
    cells: list[Step]
    paper: dict[str, Any] = {}


def parse_suite_text(text: str, name: str) -> Suite:
    """A suite as it stands in its file.

    Args:
        text: YAML.
        name: of the suite, for messages.

    Raises:
        UserError: anything that is wrong in it.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"suite {name} is not YAML: {error}") from None
    return checked(Suite, values, f"suite {name}")
