"""Rebuild the results: run the commands of eval/results/*/suite.yaml and write the tables of README
and the pages from their documents, and draw their pictures.

    python tests/scripts/results.py --parts gpt2-mini --wikitext-2 FOLDER

A part is a folder of eval/results. Its commands run in build/results, where a run that was
interrupted goes on: finished cells and scored labels are kept there as long as that folder is.
When all have run, the documents are put in the part's documents.jsonl. Commit before, and again
before the next run: a document names the commit that it was made at, and the tests take those of
clean ones alone.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.claims import NAMES, page_faults
from helpers.result_parts import (
    RESULTS,
    ROOT,
    Part,
    check_texts,
    faults,
    parts,
    put_documents,
    text_sources,
    with_what_it_reads,
)
from helpers.result_tables import draw_pictures, write_pages

from kvalign.app.cli.arguments import parse
from kvalign.app.commands.eval_run import Cell, parse_suite, run_cells
from kvalign.eval.report import SUITE_FILE, Suite
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.files import locked, read_json
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ResultsSettings(Settings):
    """Rebuild documents of eval/results, or those that are named, and the tables made of them."""

    parts: tuple[str, ...] | None = option(
        None, help="folders of eval/results, PART/CELL for one document (default: all)"
    )
    wikitext_2: Path | None = option(None, help="folder with WikiText-2's test.txt and valid.txt")
    books: Path | None = option(None, help="folder with the books of docs/corpora.md")
    work: Path = option(ROOT / "build" / "results", help="folder in which commands run")
    results: Path = option(RESULTS, help="folder for the documents")
    override: str = option("", help='flags in place of those of cells, as "--num-tokens 60"')
    run: bool = option(True, help="--no-run: only write the tables")


def rebuild(settings: ResultsSettings) -> None:
    """Run what is missing of the parts, all texts checked first; then write the tables.

    Raises:
        UserError: an unknown part or cell, a text that is missing or another.
        RunError: a command failed; what was done before is kept.
    """
    chosen = [(name, cells(name, part, settings)) for name, part in _chosen(settings)]
    folders = {"wikitext-2": settings.wikitext_2, "books": settings.books}
    for _, steps in chosen:
        for cell in steps:
            check_texts(cell.command, folders)
    work, results = settings.work.absolute(), settings.results.absolute()
    with locked(work, lambda: kept(work)):
        for name in text_sources():
            if folder := folders[name]:
                (work / name).unlink(missing_ok=True)
                (work / name).symlink_to(folder.expanduser().absolute())
        before = Path.cwd()
        os.chdir(work)  # so that documents name texts and folders without this machine's paths
        try:
            for name, steps in chosen:
                run_missing(Path(name.partition("/")[0]), steps)
            for name, steps in chosen:
                place(name.partition("/")[0], steps, results)
        finally:
            os.chdir(before)


def kept(work: Path) -> str:
    """What to say of the documents that are kept when a later command is refused; else empty."""
    return f"documents are kept in {work}" if next(work.glob("*/*.json"), None) else ""


def _chosen(settings: ResultsSettings) -> list[tuple[str, Part]]:
    known = parts()
    wanted = settings.parts or tuple(known)
    for name in wanted:
        if name.partition("/")[0] not in known:
            raise UserError(unknown("part", name.partition("/")[0], tuple(known)))
    return [(name, known[name.partition("/")[0]]) for name in wanted]


def cells(wanted: str, part: Part, settings: ResultsSettings) -> list[Cell]:
    """The commands of PART or PART/CELL, with what must be prepared for it."""
    name, _, only = wanted.partition("/")
    given = yaml.safe_load((RESULTS / name / SUITE_FILE).read_text(encoding="utf-8"))
    suite = {key: value for key, value in given.items() if key in Suite.model_fields}
    of_suite = yaml.safe_dump(suite, sort_keys=False)
    found = parse_suite(of_suite, name, settings.override) if given.get("cells") else []
    if only and only not in (names := tuple(cell.name for cell in part.cells)):
        raise UserError(unknown(f"document of {name}", only, names))
    return with_what_it_reads(found, only) if only else found


def run_missing(part: Path, steps: list[Cell]) -> None:
    """Run what is missing of the cells of a part, in a folder of its name here."""
    for path, cell in ((cell.path(part), cell) for cell in steps):
        if path.exists() and read_json(path).get("command") != cell.command:
            path.unlink()  # its command has changed since; scored labels are kept apart
    run_cells([cell for cell in steps if not cell.path(part).exists()], part)


def place(part: str, steps: list[Cell], results: Path) -> None:
    """Put the documents of a part into `results`, and say of which a test would complain."""
    names = [cell.name for cell in steps if not cell.is_preparation]
    made = {name: read_json(Path(part) / f"{name}.json") for name in names}
    put_documents(results / part, made)
    for name, document in made.items():
        for fault in faults(document):
            print(f"note: {part}/{name}: {fault}", file=sys.stderr)


def main(argv: list[str]) -> int:
    settings, _ = parse(ResultsSettings, argv, "python tests/scripts/results.py", has_json=False)
    try:
        if settings.run:
            rebuild(settings)
        if settings.results == RESULTS:
            draw_pictures()
            for page in write_pages():
                print(f"{page.relative_to(ROOT)} written", file=sys.stderr)
            if untrue := [fault for page in NAMES for fault in page_faults(page)]:
                raise RunError(
                    "sentences to mend, or eval/results/claims.yaml:\n" + "\n".join(untrue)
                )
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
