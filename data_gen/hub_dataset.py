"""Corpora from the hub: `hub:NAME[:CONFIG][:COLUMN]`, and short names for some of them.

As in `datasets`, a local folder comes before a hub data set of the same name: a copy in
./Salesforce/wikitext serves `wikitext` without a network, and so does one in the hub's cache.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.data_gen.corpus import in_pieces, of_files
from kvalign.foundation import hub
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import TEXT

if TYPE_CHECKING:
    from datasets import IterableDataset

_OFFLINE = "corpora that work offline: python-docs, text:PATH, hub:FOLDER"
_TEXT_FILES = "text"  # what `datasets` calls the reader of files that are plain text


@dataclass(frozen=True)
class HubDataset:
    """A data set of the hub, or a local folder in its format.

    Attributes:
        name: hub id or folder.
        config: one of the data set's configurations.
        column: of the text, or of conversations (lists of turns with `content`).
        train, test: the names of its splits for these.
        join: separator of rows and of turns, both unchanged; None: a turn ends with a line break
            and a row with an empty line. Text files, whose rows are lines, are read as they are.
        more_about: ends `about`.
    """

    name: str
    config: str | None = None
    column: str = "text"
    train: str = "train"
    test: str = "test"
    join: str | None = None
    more_about: str = ""

    @property
    def about(self) -> str:
        config = f" ({self.config})" if self.config else ""
        return f"{self.name}{config} from the hub{self.more_about}"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """Text of the rows, joined."""
        name_of_split = self.train if split == "train" else self.test
        dataset = _open(self.name, self.config, name_of_split, _OFFLINE)
        rows = _rows(dataset, self.name, name_of_split)
        if dataset.info.builder_name == _TEXT_FILES:
            return in_pieces(of_files(_row_text(row, self.column) for row in rows))
        if self.join is None:
            return in_pieces(_row_text(row, self.column).rstrip("\n") + "\n\n" for row in rows)
        return in_pieces(_row_text(row, self.column, self.join) + self.join for row in rows)


HUB = {
    "wikitext": HubDataset("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "everyday": HubDataset(
        "HuggingFaceTB/everyday-conversations-llama3.1-2k",
        column="messages",
        train="train_sft",
        test="test_sft",
    ),
    "paper-wikitext": HubDataset(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        join="",
        more_about=", joined as the paper's authors do: rows without separators",
    ),
    "paper-everyday": HubDataset(
        "HuggingFaceTB/smoltalk",
        "everyday-conversations",
        column="messages",
        test="train",
        join=" ",
        more_about=", joined as the paper's authors do: its train split, with spaces",
    ),
}


class AnyHubDataset:
    about = "any hub data set, or a local folder in the hub's format"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """`HubDataset` of NAME[:CONFIG][:COLUMN]; a part may be empty."""
        name, *more = rest.split(":")
        if not name or len(more) > 2:
            raise UserError(f"a hub data set is hub:NAME[:CONFIG][:COLUMN], got {'hub:' + rest!r}")
        config, column = (*more, "", "")[:2]
        return HubDataset(name, config or None, column or "text").texts("", split)


def rows_of(name: str, config: str | None, split: str, offline: str) -> Iterator[dict[str, Any]]:
    """The rows of a hub data set, or of a local folder of its name, streaming.

    Args:
        name, config: see `HubDataset`.
        split: the data set's name for it.
        offline: corpora that work without the hub, for messages.

    Raises:
        UserError: the hub cannot be reached, or the data set, configuration or split does not
            exist; for damaged files, when they are reached.
    """
    return _rows(_open(name, config, split, offline), name, split)


def _open(name: str, config: str | None, split: str, offline: str) -> "IterableDataset":
    """A data set, as of `rows_of`; the lines of text files with their breaks."""
    folder = Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    if not folder.is_dir() and (not hub.is_reachable() or _is_offline()):
        if (cached := hub.in_cache(name, "dataset")) is None:
            raise UserError(f"no folder {name!r} here and the hub cannot be reached; {offline}")
        source = str(cached)
    import datasets

    how: dict[str, Any] = {"split": split, "streaming": True}
    try:
        dataset = datasets.load_dataset(source, config, **how)
        if dataset.info.builder_name == _TEXT_FILES:
            how |= {"keep_linebreaks": True, "encoding": TEXT}
            dataset = datasets.load_dataset(source, config, **how)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"cannot load {split!r} of {name!r}: {error}; {offline}") from error
    return dataset


def _is_offline() -> bool:
    """Return whether `datasets` alone is told to stay offline, by HF_DATASETS_OFFLINE."""
    return os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _rows(dataset: "IterableDataset", name: str, split: str) -> Iterator[dict[str, Any]]:
    from datasets.exceptions import DatasetsError

    try:
        yield from dataset
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"cannot read {split!r} of {name!r}: {error}") from error


def _row_text(row: dict[str, Any], column: str, join: str = "\n") -> str:
    """The text of one row: a string as it is; of a conversation its turns, joined."""
    if column not in row:
        raise UserError(
            f"no column {column!r}: this data set has {', '.join(row)} (hub:NAME:CONFIG:COLUMN)"
        )
    value = row[column]
    if isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in value
    ):
        value = join.join(turn["content"] for turn in value)
    if not isinstance(value, str):
        raise UserError(
            f"column {column!r} holds {type(value).__name__}, not text: name another column"
        )
    return value
