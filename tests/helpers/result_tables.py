"""What is made of README and the pages, written between markers: tables from the documents of
eval/results, excerpts of the code, and lists of what there is.

<!-- table: PART/TABLE -->        as the part's suite.yaml has it
<!-- commands: PART/CELL ... -->  the commands of cells; of frozen ones with their commit
<!-- texts: NAME -->              files of a text and their SHA-256
<!-- index: parts -->             a line a part: on what, how much, when
<!-- source: kvalign.MODULE.NAME --> its file and its code; on a page in docs/
<!-- list: architectures -->      as the code's own tables have them; policies; findings of pages
<!-- end -->
"""

import re
import subprocess
from collections.abc import Collection, Iterator
from functools import cache
from itertools import chain
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Any

from helpers import doc_lists
from helpers.doc_pages import MARKED
from helpers.excerpts import excerpt
from helpers.result_parts import (
    RESULTS,
    ROOT,
    Part,
    Selection,
    Table,
    document_of,
    faults,
    parts,
    text_sources,
)
from kvalign.eval.drawing import save
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol import Evaluation
from kvalign.eval.protocol.data import Document, Row
from kvalign.eval.report import archive_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_text

PAGES = [ROOT / "README.md", *sorted(RESULTS.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

WORDS = ("table", "commands", "texts", "index", "source", "list")
LISTS = {
    name: getattr(doc_lists, name)
    for name in ("architectures", "findings", "policies", "positions")
}


def draw_pictures(results: Path = RESULTS) -> None:
    """Draw the parts' pictures anew, as far as there are today's documents for them."""
    for name, part in parts().items():
        for picture, wanted in part.pictures.items():
            document, *_ = found = [document_of(results / name, cell) for cell in wanted.cells]
            if any(map(faults, found)):
                continue
            evaluation = _evaluation_of(document)
            named = wanted.rename
            rows = [
                row | {"method": named.get(row["method"], row["method"])}
                for row, _ in _rows(wanted, results / name)
            ]
            drawn = evaluation.figure(document | {"rows": rows})
            assert drawn is not None, picture
            save(drawn[0], results / picture)


def write_pages(results: Path = RESULTS) -> list[Path]:
    """Bring what stands between markers up to date; returns the pages that changed."""
    changed = []
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        try:
            new = filled(old, results)
        except UserError as error:
            raise UserError(f"{path.relative_to(ROOT)}: {error}") from None
        if new != old:
            write_text(path, new)
            changed.append(path)
    return changed


def filled(page: str, results: Path = RESULTS, words: Collection[str] = WORDS) -> str:
    """A page with each piece made anew that is marked with one of the words; a table that lacks a
    document in `results` stays as it is, or says so.
    """
    known = parts()

    def replace(match: re.Match[str]) -> str:
        begin, word, argument, old, end = match.groups()
        if word not in words:
            return match[0]
        if word == "source":
            return begin + excerpt(argument) + end
        if word == "list":
            return begin + LISTS[argument]() + end
        if word == "index":
            return begin + _index(known, old, results) + end
        if word == "texts":
            return begin + _texts(argument) + end
        if word == "commands":
            return begin + _commands(known, argument.split()) + end
        part, _, name = argument.partition("/")
        table = known[part].tables[name]
        if missing := lacking(table, results / part):
            todo = ",".join(f"{part}/{cell}" for cell in missing)
            return begin + (old or f"*Not made yet: `make results PART={todo}`.*\n") + end
        return begin + markdown(table, results / part) + end

    return MARKED.sub(replace, page)


def marked(page: str) -> list[str]:
    """The arguments of a page's markers, each of which must have an end."""
    found = [match[3] for match in MARKED.finditer(page)]
    assert len(found) == len(re.findall(r"^<!-- \w+: ", page, re.MULTILINE))
    return found


def lacking(table: Table, folder: Path) -> list[str]:
    """The cells of a table without a document."""
    return [cell for cell in table.cells if not document_of(folder, cell)]


def markdown(table: Table, folder: Path) -> str:
    """The table of the documents in a folder.

    Raises:
        UserError: two documents give one place different figures.
    """
    lines = dict[tuple[str, ...], dict[str, str]]()
    forms = {**({table.across: table.values} if table.across else {}), **table.also}
    across_all: dict[str, list[str]] = {across: [] for across in forms}
    for row, document in _rows(table, folder):
        known = _known(row, document)
        words = (text.format(**known) for text in table.columns.values())
        line = lines.setdefault(tuple(table.rename.get(w, w) for w in words), {})
        for across, values in forms.items():
            texts = (values.get(name) for name in (row.get("method"), document["kind"], "*"))
            form = next(filter(None, texts), "")
            if across in table.also and not form:
                continue
            heading, text = across.format(**known), form.format(**known)
            heading = table.rename.get(heading, heading)
            if line.setdefault(heading, text) != text:
                raise UserError(
                    f"{folder.name}: {line[heading]} and {text} in one place of a table"
                )
            across_all[across] += [heading] * (heading not in across_all[across])
    headings = [*chain(*across_all.values())]
    rows = [
        [*words, *(line.get(heading, "-") for heading in headings)] for words, line in lines.items()
    ]
    return _table([[*table.columns, *headings], *rows])


def _rows(wanted: Selection, folder: Path) -> Iterator[tuple[Row, Document]]:
    """The rows of some cells, less those that are left out, each with its document."""
    for cell in wanted.cells:
        document = document_of(folder, cell)
        assert document is not None, cell
        for row in rows_of(document):
            known = _known(row, document)
            if not any(
                (name.format(**known) if "{" in name else row.get(name)) in values
                for name, values in wanted.leave_out.items()
            ):
                yield row, document


def rows_of(document: Document) -> list[Row]:
    """The rows of a document's tables, a sweep's trials, or one row of what else was prepared."""
    if "rows" not in document:
        return document["result"].get("trials", [{}])
    is_evaluation = document.get("kind", "").startswith("eval ")
    return _evaluation_of(document).rows(document) if is_evaluation else document["rows"]


def _evaluation_of(document: Document) -> Evaluation:
    return EVALUATIONS[document["kind"].removeprefix("eval ")]


class _NotKnown:
    """A figure that a document has not, whatever its format."""

    def __format__(self, spec: str) -> str:
        return "-"


def _shown(value: Any) -> Any:
    """A value for a format string: what is None in it, in lists and dicts too, is not known."""
    if isinstance(value, list):
        return [*map(_shown, value)]
    if isinstance(value, dict):
        return {name: _shown(one) for name, one in value.items()}
    return _NotKnown() if value is None else value


def _known(row: Row, document: Document) -> Row:
    """What format strings of a table may name."""
    method, aligner = row.get("method"), row.get("aligner")
    label = f"`{method}`" + f" ({aligner})" * bool(aligner)
    of_document = {name: value for name, value in document.items() if name != "rows"}
    known = of_document | _shown(row) | {"label": label}
    if {"batch_size", "median_ms"} <= row.keys():  # times are a token's
        known["step_ms"] = row["median_ms"] * row["batch_size"]
    return known


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _commands(known: dict[str, Part], names: list[str]) -> str:
    """A block of the commands, without where they keep losses."""
    lines = []
    for name in names:
        part, _, cell = name.partition("/")
        steps = [*known[part].prepare, *known[part].documents]
        (command,) = (step.command for step in steps if step.name == cell)
        for variable, value in known[part].variables.items():
            command = command.replace(f"{{{variable}}}", value)
        command = command.replace(" --keep {out}/losses", "").replace("{out}/", "")
        is_frozen = any(step.name == cell for step in known[part].frozen)
        if not command.startswith("python "):
            command = f"python -m kvalign {command}" if is_frozen else f"kvalign {command}"
        if is_frozen:
            commit = archive_of(RESULTS / part)[cell]["environment"]["commit"]
            lines.append(f"# in a checkout of {commit}:")
        lines += " \\\n  ".join(
            wrap(command, 116, break_on_hyphens=False, break_long_words=False)
        ).splitlines()
    return "\n".join(["```bash", *lines, "```"]) + "\n"


def _index(known: dict[str, Part], old: str, results: Path) -> str:
    """A line a part: its title, models, labels and the days of its documents' commits, which stay
    as they are where git does not know one.
    """
    before = dict(re.findall(r"^\| \[(\S+)\].* \| ([^|]*) \|$", old, re.MULTILINE))
    lines = [["part", "what it shows", "on", "how much", "made"]]
    for name, part in known.items():
        documents = archive_of(results / name)
        found = [documents[one.name] for one in part.documents if one.name in documents]
        rows = [row for one in found for row in one["rows"]]
        models = {PurePath(str(one["settings"].get("model"))).name for one in found} - {"None"}
        days = [_day(str(one["environment"].get("commit"))) for one in found]
        made = _range(sorted(days)) if all(days) else before.get(name, "")
        units = {unit: f"num_{unit}" for unit in ("labels", "questions", "steps", "chunks")}
        numbers = {unit: {row[key] for row in rows if row.get(key)} for unit, key in units.items()}
        amounts = [f"{_range(sorted(of))} {unit}" for unit, of in numbers.items() if of]
        texts = [part.title, ", ".join(sorted(models)), ", ".join(amounts), made]
        lines.append([f"[{name}]({name})", *(text or "-" for text in texts)])
    return _table(lines)


def _range(values: list[Any]) -> str:
    """The first and the last of sorted values."""
    ends = [f"{one:,}".replace(",", " ") if isinstance(one, int) else one for one in values]
    return " to ".join(dict.fromkeys([*ends[:1], *ends[-1:]]))


@cache
def _day(commit: str) -> str:
    """The day of a commit, as `git describe` names it; empty where git does not know it."""
    name = commit.removesuffix("-dirty").rpartition("-g")[2]
    command = ["git", "-C", str(ROOT), "show", "-s", "--format=%as", name]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if name else ""


def _texts(name: str) -> str:
    source = text_sources()[name]
    base = source.source if source.is_whole else ""
    rows = [["file", "SHA-256"]]
    for file, digest in source.files.items():
        shown = f"[{file}]({base}/{Path(file).stem})" if base else f"`{file}`"
        rows.append([shown, f"`{digest}`"])
    return _table(rows)
