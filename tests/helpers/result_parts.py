"""The parts of eval/results: a folder each, whose `suite.yaml` says which commands make its
documents and which tables are made of them, and whose `documents.jsonl` has these, a line each.

The first is a suite of `kvalign eval run` with more entries: `frozen`, what only the commit that
its document names can make, and `tables`.
"""

import json
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from kvalign.app.commands.eval_run import Cell
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol.data import Document
from kvalign.eval.report import ARCHIVE, SUITE_FILE, Step, Suite, archive_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import checked, sha256, write_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
TEXTS = RESULTS / "texts.yaml"


class Selection(BaseModel):
    """Rows of some cells.

    Attributes:
        cells: names of the documents, in order; `../PART/CELL` is one of another part,
            `prepared/CELL` what a preparation printed.
        leave_out: rows with one of these values of a field, or of a format string.
        rename: a heading, a label or a picture's method, and what stands in its place.
    """

    model_config = ConfigDict(extra="forbid")

    cells: list[str]
    leave_out: dict[str, list[Any]] = {}
    rename: dict[str, str] = {}


class Table(Selection):
    """A table of rows.

    What stands in it are format strings of a row's fields, its document's `settings`, `environment`
    and `peer`, `label`, the method with its aligner, and `step_ms`, the median of a whole batch.

    Attributes:
        columns: text by heading; rows of equal texts are one line.
        across: a heading; each of its values is one more column, with `values` in its lines.
        values: text by method or by kind of document, "*" for the others.
        also: further headings, with their values; rows without one have no such column.
    """

    columns: dict[str, str]
    across: str | None = None
    values: dict[str, str] = {}
    also: dict[str, dict[str, str]] = {}


class Part(Suite, frozen=True):
    frozen: list[Step] = Field(default_factory=list)
    tables: dict[str, Table] = Field(default_factory=dict)
    pictures: dict[str, Selection] = Field(default_factory=dict)

    @property
    def documents(self) -> list[Step]:
        """What has a document."""
        return [*self.cells, *self.frozen]


class TextSource(BaseModel):
    """A text that does not ship.

    Attributes:
        files: SHA-256 by name in the folder.
        is_whole: the folder is read as one text, so nothing else may be in it.
    """

    model_config = ConfigDict(extra="forbid")

    title: str
    source: str
    licence: str
    is_whole: bool = False
    files: dict[str, str]


@lru_cache(maxsize=1)
def parts() -> dict[str, Part]:
    """The parts by the names of their folders."""
    return {
        path.parent.name: checked(Part, yaml.safe_load(path.read_text("utf-8")), path)
        for path in sorted(RESULTS.glob(f"*/{SUITE_FILE}"))
    }


@lru_cache(maxsize=1)
def text_sources() -> dict[str, TextSource]:
    """The texts that do not ship, by the names that commands have for their folders."""
    values = yaml.safe_load(TEXTS.read_text("utf-8"))
    return {name: checked(TextSource, value, f"{TEXTS}, {name}") for name, value in values.items()}


def check_texts(command: str, folders: dict[str, Path | None]) -> None:
    """The texts that a command reads are at hand, and no others of the same names.

    Raises:
        UserError: a text that is not there or has another SHA-256.
    """
    for name, file in re.findall(r"text:([\w-]+)(?:/([\w.-]+))?", command):
        source, folder = text_sources()[name], folders.get(name)
        where = f"text:{name} is not shipped: name its folder, --{name} FOLDER ({source.source})"
        if folder is None:
            raise UserError(where)
        expected = source.files if not file else {file: source.files[file]}
        for wanted, digest in expected.items():
            path = folder / wanted
            if not path.is_file():
                raise UserError(f"{where}; {folder} has no {wanted}")
            if (found := sha256(path)) != digest:
                raise UserError(f"{path} has SHA-256 {found[:16]}, the results' text {digest[:16]}")
        names = {text.name for text in folder.rglob("*.txt")}
        if source.is_whole and (more := names - source.files.keys()):
            raise UserError(f"{folder} has more texts than {name}: {', '.join(sorted(more))}")


def document_of(folder: Path, cell: str) -> Document | None:
    """The document of a cell, which may be of another part, if it was made."""
    if cell.startswith("../"):
        _, part, cell = cell.split("/", 2)
        folder = folder.parent / part
    return archive_of(folder).get(cell)


def put_documents(folder: Path, new: dict[str, Document]) -> None:
    """Put documents in a part, in place of those of their names."""
    documents = archive_of(folder) | new
    lines = [json.dumps({"name": name} | document) for name, document in documents.items()]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / ARCHIVE, "\n".join(lines) + "\n")


def faults(document: Document | None) -> list[str]:
    """What keeps a document from standing for a table's figures: none, or what to run again."""
    if document is None:
        return ["missing"]
    if missing := {"kind", "command", "settings", "environment", "rows"} - document.keys():
        return [f"it lacks {', '.join(sorted(missing))}"]
    family, _, name = document["kind"].partition(" ")
    if family != "script" and name not in EVALUATIONS:
        return [f"no evaluation {name!r}"]
    commit = str(document["environment"].get("commit"))
    if not re.fullmatch(r"([\w.]+-\d+-g)?[0-9a-f]{7,}", commit):
        return [f"commit {commit!r}: not that of a clean checkout"]
    return []


def with_what_it_reads(cells: list[Cell], name: str) -> list[Cell]:
    """The cell of that name, and before it the preparations whose `--out` it names, or they do."""
    needed = [cell for cell in cells if cell.name == name]
    for cell in reversed([cell for cell in cells if cell.is_preparation]):
        words = shlex.split(cell.command)
        out = words[words.index("--out") + 1]
        if any(re.search(rf"{re.escape(out)}(?![\w-])", other.command) for other in needed):
            needed.insert(0, cell)
    return needed
