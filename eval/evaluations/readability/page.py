"""The page that `kvalign eval readability` writes: a folder of results with one document."""

import itertools
import logging
import webbrowser
from pathlib import Path

from kvalign.eval.protocol.evaluation import Document
from kvalign.eval.report.page import PAGE, write_report
from kvalign.foundation.files import read_json, write_json

log = logging.getLogger(__name__)

NAME = "readability"


def free_folder() -> Path:
    """`readability`, or `readability-2` and so on: the first name that does not exist."""
    names = itertools.chain([NAME], (f"{NAME}-{n}" for n in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())


def is_free(folder: Path, command: str) -> bool:
    """Return whether the folder has no document, or the one that this command left when it was
    killed: its page is missing or older.
    """
    path, page = folder / f"{NAME}.json", folder / PAGE
    if not path.exists():
        return True
    is_shown = page.exists() and page.stat().st_mtime_ns >= path.stat().st_mtime_ns
    return not is_shown and read_json(path).get("command") == command


def write_page(document: Document, folder: Path, in_browser: bool) -> None:
    """Write the document, and the report of the folder; open it if wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{NAME}.json", document)
    page = write_report(folder)
    if in_browser and not webbrowser.open(page.resolve().as_uri()):
        log.warning("no browser to open %s in", page)
