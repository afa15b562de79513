"""Folder of results: one JSON document per file, and the suite that they are cells of, if any."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol.evaluation import Document
from kvalign.eval.report.suite_file import Suite, fill_in, parse_suite_text
from kvalign.eval.report.sweeps import Sweep
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import checked, read_json, read_text

SUITE_FILE = "suite.yaml"
PREPARED = "prepared"  # folder of what the suite's preparations printed
NO_SUITE = Suite(cells=[])


@dataclass(frozen=True)
class Results:
    """Documents by name (the file's), the suite, and the sweeps among its preparations."""

    documents: dict[str, Document]
    suite: Suite = NO_SUITE
    sweeps: dict[str, Sweep] = field(default_factory=dict)

    def of(self, evaluation: str) -> dict[str, Document]:
        return {n: d for n, d in self.documents.items() if d["kind"] == f"eval {evaluation}"}


def read(folder: Path) -> Results:
    """Read the documents of a folder, in the suite's order.

    Raises:
        NotFoundError: the folder does not exist, or has no results.
        UserError: a .json file that is not a document of `kvalign eval`, or a damaged suite; the
            message names the file and the field.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {str(folder)!r}: name one of `kvalign eval run`")
    file = folder / SUITE_FILE
    suite = parse_suite_text(read_text(file), str(file)) if file.exists() else NO_SUITE
    ranks = {cell.name: rank for rank, cell in enumerate(suite.cells)}
    names = sorted(path.stem for path in folder.glob("*.json"))
    names.sort(key=lambda name: ranks.get(name, len(ranks)))
    documents = {name: read_document(folder / f"{name}.json") for name in names}
    for document in documents.values():
        document["command"] = fill_in(document["command"], folder)
    if not documents:
        raise NotFoundError(
            f"no results in {folder}: run `kvalign eval run quick --out {folder}`, or "
            f"`kvalign eval ... --out {folder}/NAME.json`"
        )
    tuned = [step.name for step in suite.prepare if step.command.split()[:1] == ["tune"]]
    paths = [folder / PREPARED / f"{name}.json" for name in tuned]
    sweeps = {x.stem: read_json(x)["result"] for x in paths if x.exists()}
    return Results(documents, suite, sweeps)


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
