"""Corpora: the base class, how rows become pieces of text, and all kinds but Python's own texts;
and prompts. Corpora of the hub are `hub:NAME[:CONFIG][:COLUMN]`, and short names for some of them.

As in `datasets`, a local folder comes before a hub data set of the same name: a copy in
./Salesforce/wikitext serves `wikitext` without a network, and so does one in the hub's cache.
"""

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvalign.foundation import hub
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import TEXT, parse_json, text_of
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import typed

if TYPE_CHECKING:
    from datasets import IterableDataset

PIECE_LEN = 1 << 20  # characters in memory at once
# Of the corpus `recall`, in tokens.
RECALL_LEN = {"train": 1_000_000, "test": 200_000}
RECALL_LINE_LEN = 64
COLOURS = "black blue brown golden green grey orange pink purple red white yellow"
THINGS = "bag bicycle boat box car chest cupboard door gate house locker suitcase"
OWNERS = [f"{colour} {thing}" for colour in COLOURS.split() for thing in THINGS.split()]
"""Owners of codes that a text tells."""


class Corpus(Protocol):
    """A source of text."""

    @property
    def about(self) -> str:
        """Description in half a line for `kvalign list corpora`."""

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """Text of `train` or `test` in pieces of about `PIECE_LEN`; `rest` is the part of the
        specification after the colon. Errors that the user can correct are raised by the call
        itself, before the first piece, if they are known by then.
        """


def in_pieces(rows: Iterable[str]) -> Iterator[str]:
    """Rows joined to pieces of `PIECE_LEN` or more; each but the last ends at a line end."""
    piece: list[str] = []
    piece_len = 0
    for row in rows:
        piece.append(row)
        piece_len += len(row)
        if piece_len >= PIECE_LEN and row.endswith("\n"):
            yield "".join(piece)
            piece, piece_len = [], 0
    if piece:
        yield "".join(piece)


def of_files(lines: Iterable[str]) -> Iterator[str]:
    """Lines of files, one file after the other: the last line of each ends before the next one."""
    is_open = False
    for line in lines:
        yield "\n" * is_open + line
        is_open = not line.endswith("\n")


class TextFiles:
    """The corpora `text:PATH`: the user's text files."""

    about = "a file, a folder of .txt files or a glob; one text for both splits"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """Text of the files, in the order of their names.

        Raises:
            NotFoundError: no file matches.
            UserError: a file is not UTF-8; raised when it is reached.
        """
        return in_pieces(of_files(_lines(files_of(rest))))


def files_of(rest: str) -> list[Path]:
    """Files of a file's name, a folder or a glob, in order; NotFoundError if there is none."""
    path = Path(rest).expanduser()
    paths = path.rglob("*.txt") if path.is_dir() else map(Path, glob.glob(str(path)))
    files = [path] if path.is_file() else sorted(filter(Path.is_file, paths), key=str)
    if not files:
        raise NotFoundError(
            f"no text at {rest!r}: name a file, a folder with .txt files, or a glob"
        )
    return files


def sha256_of(rest: str) -> str:
    """SHA-256 of the concatenated files, as of `cat FILES`."""
    digest = hashlib.sha256()
    for file in files_of(rest):
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def _lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            with file.open(encoding=TEXT) as lines:
                yield from lines
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text: {error}") from None


class RecallFacts:
    """The corpus `recall`: a stream of facts and questions (`kvalign.data_gen.facts`) as text."""

    about = "facts, questions and answers for the models recall-gpt2 and recall-llama; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """One stream for each split, `RECALL_LINE_LEN` tokens a line."""
        from kvalign.data_gen.facts import WORDS, FactStreams  # numpy

        stream = FactStreams(seed=int(split == "test"))
        num_lines = RECALL_LEN[split] // RECALL_LINE_LEN
        lines = (stream.take(RECALL_LINE_LEN)[0] for _ in range(num_lines))
        return in_pieces(" ".join(WORDS[i] for i in line) + "\n" for line in lines)


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
        """`HubDataset` of `NAME[:CONFIG][:COLUMN]`; a part may be empty."""
        name, *more = rest.split(":")
        if not name or len(more) > 2:
            raise UserError(f"a hub data set is hub:NAME[:CONFIG][:COLUMN], got {'hub:' + rest!r}")
        config, column = (*more, "", "")[:2]
        return HubDataset(name, config or None, column or "text").texts("", split)


def _open(name: str, config: str | None, split: str, offline: str) -> "IterableDataset":
    """A data set of the hub, or a local folder of its name, streaming; the lines of text files with
    their breaks.

    Args:
        split: the data set's name for it.
        offline: corpora or prompts that work without the hub, for messages.

    Raises:
        UserError: the hub cannot be reached, or there is no such data set, configuration or split.
    """
    folder = Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    # What tells `datasets` alone to stay offline.
    is_offline = os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if not folder.is_dir() and (is_offline or not hub.is_reachable()):
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


def _rows(dataset: "IterableDataset", name: str, split: str) -> Iterator[dict[str, Any]]:
    """The rows; UserError for damaged files, when they are reached."""
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


MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
PROMPTS = ("own", "mt-bench", "PATH.jsonl")
OWN = Path(__file__).with_name("own_prompts.jsonl")


def conversations(spec: str) -> list[list[str]]:
    """Conversations, prompts of streams: lists of one user turn or more.

    | specification | conversations |
    |---|---|
    | `own` | four of our own, two turns each; offline |
    | `mt-bench` | MT-Bench (Zheng et al. 2023) from the hub: 80 of two turns |
    | `PATH.jsonl` | a file of objects, one a line, with `turns` (as FastChat's) or `prompt` |

    Each first turn of `own` breaks off in the middle of a text, for models that continue texts
    instead of answering.

    Raises:
        UserError: unknown prompts, a hub that cannot be reached (the message names prompts that
            work offline), or a row without a turn (the message names its line).
        NotFoundError: no such file.
    """
    spec = typed("prompts", spec, str)
    if spec == "mt-bench":
        offline = "prompts that work offline: own, PATH.jsonl"
        rows = _rows(_open(MT_BENCH, None, "train", offline), MT_BENCH, "train")
        turns = [_turns(row, f"{MT_BENCH} row {number}") for number, row in enumerate(rows)]
    elif spec == "own" or spec.endswith(".jsonl"):
        path = OWN if spec == "own" else Path(spec).expanduser()
        if not path.is_file():
            raise NotFoundError(f"no prompts at {str(path)!r}: name a .jsonl file")
        # As bytes: JSON may hold characters that end a line for str.splitlines.
        lines = [(f"{path}:{n}", x) for n, x in enumerate(path.read_bytes().splitlines(), 1)]
        turns = [
            _turns(parse_json(text_of(line, where), where), where)
            for where, line in lines
            if line.strip()
        ]
    else:
        raise UserError(unknown("prompts", spec, PROMPTS))
    if not turns:
        raise UserError(f"no prompt in {spec}: at least one is needed")
    return turns


def _turns(row: Any, where: str) -> list[str]:
    """The turns of a row, whose other fields are left aside."""
    found = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
    turns = [found] if isinstance(found, str) and "turns" not in row else found
    are_texts = isinstance(turns, list) and all(isinstance(x, str) and x.strip() for x in turns)
    if not (are_texts and turns):
        needed = '"turns" (a list of texts) or "prompt" (a text or a list of them)'
        raise UserError(f"{where} needs {needed}, got {found!r:.80}")
    return turns
