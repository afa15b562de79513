"""A folder of results: one JSON document a file, and the suite they are cells of, if any."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import RootModel

from kvalign.errors import NotFoundError, UserError
from kvalign.eval.evaluation import Document
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.suite_file import Suite, parse_suite_text
from kvalign.files import checked, read_json

SUITE_FILE = "suite.yaml"
NO_SUITE = Suite(cells=[])


@dataclass(frozen=True)
class Results:
    """Documents by name (the file's), and the suite."""

    documents: dict[str, Document]
    suite: Suite = NO_SUITE

    def of(self, evaluation: str) -> dict[str, Document]:
        """Documents of one evaluation, by name."""
        return {n: d for n, d in self.documents.items() if d["kind"] == f"eval {evaluation}"}


def read(folder: Path) -> Results:
    """Read the documents of a folder, in the suite's order.

    Raises:
        NotFoundError: no folder, or none with results.
        UserError: a .json file that is no document of `kvalign eval`, or a damaged suite; the
            message names the file and the field.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {str(folder)!r}: name one of `kvalign eval run`")
    suite = _suite(folder / SUITE_FILE)
    documents = {path.stem: _document(path) for path in sorted(folder.glob("*.json"))}
    if not documents:
        raise NotFoundError(
            f"no results in {folder}: run `kvalign eval run quick --out {folder}`, or put what "
            "`kvalign eval ... --json` prints there as .json files"
        )
    ranks = {cell.name: rank for rank, cell in enumerate(suite.cells)}
    names = sorted(documents, key=lambda name: (ranks.get(name, len(ranks)), name))
    return Results({name: documents[name] for name in names}, suite)


def _suite(path: Path) -> Suite:
    if not path.is_file():
        return NO_SUITE
    try:
        return parse_suite_text(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"suite {path} is not text: {error}") from None


def _document(path: Path) -> Document:
    where = f"{path} is no document of `kvalign eval --json`"
    try:
        values = read_json(path)
        kind = values.get("kind")
        evaluation = EVALUATIONS.find(str(kind).removeprefix("eval "))
        document = checked(RootModel[evaluation.document], values, "it").root  # type: ignore[name-defined]
        evaluation.check(document)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return document
