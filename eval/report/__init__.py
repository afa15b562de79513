"""Folder of results: documents, a .json file each or lines of an archive, and the suite whose cells
they are, if any. The modules show such a folder as one page, in a browser or in a terminal.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field

from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol.data import Document
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import checked, parse_json, read_json, read_text

SUITE_FILE = "suite.yaml"
ARCHIVE = "documents.jsonl"  # documents with their `name`, a line each
PREPARED = "prepared"  # folder of what the suite's preparations printed
OUT = "{out}"  # in a command: the folder of the results, which may be moved


class Step(BaseModel, extra="forbid"):
    """Command of a suite; its output is stored under its name."""

    name: str
    command: str


class Suite(BaseModel, frozen=True, extra="forbid"):
    """Suite of evaluations, `cells`, and their preparations, `prepare`, in order; `{name}` in a
    command stands for one of `variables`, `{out}` for the folder of the results.
    """

    title: str = ""
    about: str = ""
    variables: dict[str, str] = {}
    prepare: list[Step] = []
    cells: list[Step]

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


class _SuiteOfResults(Suite, frozen=True, extra="ignore"):
    """Suite whose file also says what else is made of the results."""


def parse_suite_text(text: str, name: str, kind: type[Suite] = Suite) -> Suite:
    """Suite that a YAML text describes; UserError, which begins with `name`, if it is invalid."""
    try:
        values: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"suite {name} is not YAML: {' '.join(str(error).split())}") from None
    return checked(kind, values, f"suite {name}")


NO_SUITE = Suite(cells=[])


@dataclass(frozen=True)
class Results:
    """Documents by name (the file's), and the suite."""

    documents: dict[str, Document]
    suite: Suite = NO_SUITE

    def of(self, evaluation: str) -> dict[str, Document]:
        return {n: d for n, d in self.documents.items() if d["kind"] == f"eval {evaluation}"}


def read(folder: Path) -> Results:
    """Read the documents of a folder, in the suite's order.

    Raises:
        NotFoundError: the folder does not exist, or has no results.
        UserError: a .json file that is not a document of `kvalign eval`, or a damaged suite.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {str(folder)!r}: name one of `kvalign eval run`")
    file, suite, contents = folder / SUITE_FILE, NO_SUITE, archive_of(folder)
    if file.exists():
        suite = parse_suite_text(read_text(file), str(file), _SuiteOfResults)
    contents |= {path.stem: read_document(path) for path in folder.glob("*.json")}
    evaluated = {n: d for n, d in contents.items() if str(d.get("kind")).startswith("eval ")}
    ranks = {cell.name: rank for rank, cell in enumerate(suite.cells)}
    names = sorted(evaluated, key=lambda name: (ranks.get(name, len(ranks)), name))
    documents = {name: evaluated[name] for name in names}
    for document in documents.values():
        if OUT in document["command"]:
            words = shlex.split(document["command"])
            document["command"] = shlex.join(word.replace(OUT, str(folder)) for word in words)
    if not documents:
        raise NotFoundError(
            f"no results in {folder}: run `kvalign eval run quick --out {folder}`, or "
            f"`kvalign eval ... --out {folder}/NAME.json`"
        )
    return Results(documents, suite)


class _Line(BaseModel, extra="allow"):
    name: str


def archive_of(folder: Path) -> dict[str, Document]:
    """Documents of a folder's archive by their names; those of preparations begin `prepared/`."""
    path = folder / ARCHIVE
    lines = read_text(path).splitlines() if path.exists() else []
    entries = [checked(_Line, parse_json(line, path), path).model_dump() for line in lines]
    return {document.pop("name"): document for document in entries}


class _Row(BaseModel):
    """Fields that every row has; its figures are those of the evaluation."""

    method: str
    aligner: str | None
    cache_size: int | None
    num_sinks: int | None
    num_evicted: int | None


class _Settings(BaseModel):
    model: str | None


class _Document(BaseModel):
    kind: str
    command: str
    changed: str = ""
    settings: _Settings
    environment: dict[str, Any]
    rows: Annotated[list[_Row], Field(min_length=1)]


def read_document(path: Path) -> Document:
    """Document in a file; UserError if it is not one of this version's evaluations."""
    try:
        document = read_json(path)
        checked(_Document, document, "it")
        EVALUATIONS.find(document["kind"].removeprefix("eval "))
    except UserError as error:
        raise UserError(f"{path} is not a document of `kvalign eval --json`: {error}") from None
    return document
