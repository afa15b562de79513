"""A folder of results: one JSON document a file, and the suite they are cells of, if any."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SUITE_FILE = "suite.yaml"
KINDS = ("perplexity", "latency", "readability", "streameval", "chat")


@dataclass(frozen=True)
class Results:
    """Documents by name (the file's), and the suite's entries."""

    documents: dict[str, dict[str, Any]]
    suite: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Documents of one command: `perplexity` for `kvalign eval perplexity`."""
        return {n: d for n, d in self.documents.items() if d["kind"] == f"eval {kind}"}


def read(folder: Path) -> Results:
    """Read the documents of a folder, in the suite's order.

    Raises:
        NotADirectoryError, FileNotFoundError: no folder, or none with results.
        ValueError: a .json file that is no document of `kvalign eval`.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {str(folder)!r}: name one of `kvalign eval run`")
    suite = {}
    if (folder / SUITE_FILE).is_file():
        suite = yaml.safe_load((folder / SUITE_FILE).read_text(encoding="utf-8"))
    documents = {path.stem: _document(path) for path in sorted(folder.glob("*.json"))}
    if not documents:
        raise FileNotFoundError(
            f"no results in {folder}: run `kvalign eval run quick --out {folder}`, or put what "
            "`kvalign eval ... --json` prints there as .json files"
        )
    order = [cell["name"] for cell in suite.get("cells", ())]
    ranks = {name: rank for rank, name in enumerate(order)}
    names = sorted(documents, key=lambda name: (ranks.get(name, len(ranks)), name))
    return Results({name: documents[name] for name in names}, suite)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = document["kind"].removeprefix("eval ") in KINDS
        rows = document["rows"]
        complete = {"command", "settings", "environment"} <= document.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no document of `kvalign eval --json`: {error}") from error
    if not (known and complete and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(
            f"{path} is no document of `kvalign eval --json`: it needs kind, command, settings, "
            "environment and rows"
        )
    return document
