"""Folder of results: one JSON document per file, and the suite that they are cells of, if any."""

import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictFloat, StrictInt, create_model, model_validator

from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol.evaluation import Document, Evaluation
from kvalign.eval.report.suite_file import Suite, fill_in, parse_suite_text
from kvalign.eval.report.sweeps import Sweep
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import checked, read_checked, read_json, read_text

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
    sweeps = {x.stem: read_checked(_Prepared, x).result for x in paths if x.exists()}
    return Results(documents, suite, sweeps)


class _Prepared(BaseModel):
    """The document of a sweep, a preparation."""

    result: Sweep


_MOST = 1e15
_Figure = Annotated[StrictInt | StrictFloat, Field(ge=-_MOST, le=_MOST)]
_Positive = Annotated[StrictInt | StrictFloat, Field(ge=1 / _MOST, le=_MOST)]
_Name = Annotated[str, Field(max_length=200)]
_Path = Annotated[str, Field(max_length=4096)]
# Beyond them no table is read, and none is drawn in seconds.
_MOST_ROWS, _MOST_METHODS = 1000, 100
_Count = Annotated[int, Field(strict=True, ge=0, le=_MOST)]


class _Row(BaseModel, extra="allow"):
    @model_validator(mode="before")
    @classmethod
    def _endless(cls, row: Any) -> Any:
        """Older documents have infinity where an interval has no upper end."""
        values = row.items() if isinstance(row, dict) else ()
        return {k: None if v == math.inf else v for k, v in values} or row

    method: _Name
    aligner: _Path | None
    cache_size: Annotated[_Count, Field(ge=1)]
    num_sinks: _Count
    num_evicted: _Count
    aligner_label: _Name | None = None
    aligner_path: _Path | None = None
    aligner_revision: _Name | None = None
    realign_every: _Count | None = None
    policy: _Name | None = None
    num_recent: _Count | None = None
    positions: _Name | None = None
    cache_dtype: _Name | None = None
    memory: _Count | None = None
    num_recalled: _Count | None = None


class _Settings(BaseModel, extra="allow"):
    model: _Path | None


class _Document(BaseModel):
    kind: str
    command: str
    changed: str = ""
    environment: dict[str, Any]


def read_document(path: Path) -> Document:
    """Document in a file; UserError if it is not one of this version's evaluations."""
    try:
        values = read_json(path)
        evaluation = EVALUATIONS.find(str(values.get("kind")).removeprefix("eval "))
        document = checked(_model_of(evaluation), values, "it").model_dump(exclude_unset=True)
        _check_columns(evaluation, document["rows"])
        if (num := len({row["method"] for row in document["rows"]})) > _MOST_METHODS:
            raise UserError(f"rows.method: at most {_MOST_METHODS} methods, got {num}")
        evaluation.check(document)
    except UserError as error:
        raise UserError(f"{path} is not a document of `kvalign eval --json`: {error}") from None
    return document


def _check_columns(evaluation: Evaluation, rows: list[dict[str, Any]]) -> None:
    """Raise UserError for a figure that some rows have and others lack; intervals may be open."""
    ends = {end for column in evaluation.all_columns.values() for end in column.ends or ()}
    for name, column in evaluation.all_columns.items():
        has = {row.get(name) is not None for row in rows}
        if column.is_optional and name not in ends and len(has) > 1:
            raise UserError(f"rows.{name}: some rows have it and others lack it")


def _model_of(evaluation: Evaluation) -> type[BaseModel]:
    """Return the model that a document of an evaluation must fit."""
    columns: dict[str, Any] = {}
    for name, column in evaluation.all_columns.items():
        figure = _Positive if name in evaluation.above_0 else _Figure
        columns[name] = (figure | None, None) if column.is_optional else (figure, ...)
    columns |= _required(evaluation.row_fields)
    columns |= {name: (hint | None, None) for name, hint in evaluation.row_options}
    row = create_model("Row", __base__=_Row, **columns)
    hints = typing.get_type_hints(evaluation.settings)
    settings = _required((name, hints[name]) for name in evaluation.settings_read)
    return create_model(
        "Document",
        __base__=_Document,
        settings=(create_model("Settings", __base__=_Settings, **settings), ...),
        rows=(list[row], Field(min_length=1, max_length=_MOST_ROWS)),  # type: ignore[valid-type]
        **_required(evaluation.document_fields),
    )


def _required(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: (hint, ...) for name, hint in fields}
