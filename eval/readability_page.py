"""The page that `kvalign eval readability` writes: a folder of results with one document."""

import itertools
import logging
import webbrowser
from pathlib import Path

from kvalign.eval.evaluation import Document
from kvalign.eval.report import write_report
from kvalign.files import write_json

log = logging.getLogger(__name__)


def free_folder() -> Path:
    """`readability`, or `readability-2` and so on: the first that is not there yet."""
    names = itertools.chain(["readability"], (f"readability-{n}" for n in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())


def write_page(document: Document, folder: Path, name: str, in_browser: bool) -> None:
    """Write the document as NAME.json, and the report of the folder; open it if asked to."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", document)
    page = write_report(folder)
    if in_browser and not webbrowser.open(page.resolve().as_uri()):
        log.warning("no browser to open %s in", page)
