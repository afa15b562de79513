"""A folder of results: one JSON document a file, and the suite they are cells of, if any."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvalign.errors import NotFoundError, UserError

SUITE_FILE = "suite.yaml"
SIZES = {"method", "aligner", "cache_size", "num_sinks", "num_evicted"}
COLUMNS = {
    "perplexity": {"num_labels", "perplexity", "low", "high", "segments", "seconds"},
    "latency": {"batch_size", "ttft_ms", "median_ms", "p90_ms"},
    "readability": {"no_repeat_ngram_size", "prompt", "readable", "text", "chunks"},
    "streameval": {"distance_lines", "accuracy", "answer_nll_nats"},
    "chat": {"answer", "readable", "text"},
}
"""What the report needs of the rows of each evaluation, beside SIZES."""

MORE = {"readability": {"prompts", "word_list"}, "chat": {"word_list"}}
SETTINGS = {"perplexity": {"corpus", "reference", "stepwise"}}


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
        UserError: no folder, or none with results.
        UserError: a .json file that is no document of `kvalign eval`.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {str(folder)!r}: name one of `kvalign eval run`")
    suite: dict[str, Any] = {}
    order: list[str] = []
    if (folder / SUITE_FILE).is_file():
        try:
            suite = yaml.safe_load((folder / SUITE_FILE).read_text(encoding="utf-8"))
            order = [cell["name"] for cell in suite["cells"]]
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{folder / SUITE_FILE} is damaged ({error}): delete it") from error
    documents = {path.stem: _document(path) for path in sorted(folder.glob("*.json"))}
    if not documents:
        raise NotFoundError(
            f"no results in {folder}: run `kvalign eval run quick --out {folder}`, or put what "
            "`kvalign eval ... --json` prints there as .json files"
        )
    ranks = {name: rank for rank, name in enumerate(order)}
    names = sorted(documents, key=lambda name: (ranks.get(name, len(ranks)), name))
    return Results({name: documents[name] for name in names}, suite)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        lacks = _lacks(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        lacks = f"{type(error).__name__}: {error}"
    if lacks:
        raise UserError(f"{path} is no document of `kvalign eval --json`: {lacks}")
    return document


def _lacks(document: dict[str, Any]) -> str:
    """What a document of an evaluation needs and this one has not, or ""."""
    if absent := {"kind", "command", "settings", "environment", "rows"} - document.keys():
        return f"no {', '.join(sorted(absent))}"
    kind = document["kind"].removeprefix("eval ")
    if kind not in COLUMNS:
        return f"kind is {document['kind']!r}"
    if not document["rows"]:
        return "it has no rows"
    absent = MORE.get(kind, set()) - document.keys()
    absent |= ({"model"} | SETTINGS.get(kind, set())) - document["settings"].keys()
    for row in document["rows"]:
        absent |= (SIZES | COLUMNS[kind]) - row.keys()
    return f"no {', '.join(sorted(absent))}" if absent else ""
