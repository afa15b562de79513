"""Text to record, train and evaluate on: one specification string per corpus.

`SPECS` says which there are; `kvalign corpora` lists them.

Files and hub data sets are read through `datasets`, streaming. As in `datasets`, a local folder is
taken before a hub data set of the same name: a copy in ./Salesforce/wikitext serves `wikitext`
without a network. A tokenised corpus is one stream of ids: no special tokens, rows joined.
"""

import difflib
import glob
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign import hub
from kvalign.data_gen.python_docs import python_docs
from kvalign.errors import NotFoundError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OFFLINE = ("python-docs", "text:PATH", "hub:FOLDER")
PIECE_LEN = 1 << 20  # characters held at once: bounds memory

# A text can be cut after the last of these newlines: no tokenizer that splits words by one of the
# usual patterns (GPT-2, Llama 3, o200k) has a token across it, or one that differs at a text's end.
_CUT = re.compile(r"(?s).*(?:(?<=\S)\n(?=\w)|\n(?= \w))")


@dataclass(frozen=True)
class HubCorpus:
    """Where a hub data set lies and which of its splits serve as `train` and `test`."""

    name: str
    config: str | None = None
    column: str = "text"
    train: str = "train"
    test: str = "test"

    @property
    def about(self) -> str:
        return f"{self.name}{f' ({self.config})' if self.config else ''} from the hub"


HUB = {
    "wikitext": HubCorpus("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "everyday": HubCorpus(
        "HuggingFaceTB/everyday-conversations-llama3.1-2k",
        column="messages",
        train="train_sft",
        test="test_sft",
    ),
}
SPECS = {
    "python-docs": "CPython's language reference and docstrings; offline",
    **{name: corpus.about for name, corpus in HUB.items()},
    "hub:NAME[:CONFIG][:COLUMN]": "any hub data set, or a local folder in the hub's format",
    "text:PATH": "a file, a folder of .txt files or a glob; one text for both splits",
    "marked:SPEC": "any of these in WikiText's tokenised form (`it 's a two @-@ part word`)",
}
NAMES = tuple(SPECS)


def texts(spec: str, split: str = "train") -> Iterator[str]:
    """Yield the text of a corpus in pieces of about a megabyte; joined, they are the whole of it.

    Args:
        spec: one of `SPECS`.
        split: `train` or `test`. A `text:` corpus is the same in both: keep the two apart yourself.

    Raises:
        UserError: unknown corpus, split or column, or a hub that cannot be reached (the message
            names the corpora that work offline).
        NotFoundError: `text:` with a path that matches nothing.
    """
    if split not in ("train", "test"):
        raise UserError(f"split must be train or test, got {split!r}")
    kind, _, rest = spec.partition(":")
    if spec == "python-docs":
        return _pieces(row["text"] + "\n\n" for row in python_docs(split))
    if kind == "text" and rest:
        return _pieces(_file_lines(rest))
    if kind == "marked" and rest:
        return map(_mark, texts(rest, split))
    if spec in HUB:
        return _pieces(_hub_rows(HUB[spec], split))
    if kind == "hub" and rest:
        return _pieces(_hub_rows(_parse_hub(rest), split))
    near = difflib.get_close_matches(spec, NAMES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"unknown corpus {spec!r}{hint} (known: {', '.join(NAMES)})")


def token_pieces(
    spec: str, tokenizer: "PreTrainedTokenizerBase", split: str = "train"
) -> Iterator[list[int]]:
    """Yield the ids of a corpus, about a megabyte of text at a time, without special tokens.

    With a byte-level tokenizer they are the ids of the whole text; one that puts a space before
    every text (SentencePiece) does so to each piece.
    """
    held = ""
    for text in texts(spec, split):
        held += text
        if cut := _CUT.match(held):
            yield _ids(held[: cut.end()], tokenizer)
            held = held[cut.end() :]
    if held:
        yield _ids(held, tokenizer)


def _ids(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _pieces(rows: Iterable[str]) -> Iterator[str]:
    """Join rows to pieces of PIECE_LEN or more, each but the last ending where a line ends."""
    held: list[str] = []
    held_len = 0
    for row in rows:
        held.append(row)
        held_len += len(row)
        if held_len >= PIECE_LEN and row.endswith("\n"):
            yield "".join(held)
            held, held_len = [], 0
    if held:
        yield "".join(held)


def _file_lines(path: str) -> Iterator[str]:
    import datasets

    place = Path(path).expanduser()
    if place.is_dir():
        found = sorted(str(file) for file in place.rglob("*.txt"))
    else:
        found = [str(place)] if place.is_file() else sorted(glob.glob(str(place)))
    found = [glob.escape(file) for file in found if Path(file).is_file()]  # `datasets` globs too
    if not found:
        raise NotFoundError(
            f"no text at {path!r}: name a file, a folder with .txt files, or a glob"
        )
    rows = datasets.load_dataset(
        "text", data_files=found, split="train", streaming=True, keep_linebreaks=True
    )
    return (row["text"] for row in rows)


def _parse_hub(text: str) -> HubCorpus:
    """NAME[:CONFIG][:COLUMN]; an empty part is one left out."""
    name, *more = text.split(":")
    if not name or len(more) > 2:
        raise UserError(f"a hub data set is hub:NAME[:CONFIG][:COLUMN], got {'hub:' + text!r}")
    config, column = (*more, "", "")[:2]
    return HubCorpus(name, config or None, column or "text")


def _hub_rows(corpus: HubCorpus, split: str) -> Iterator[str]:
    import datasets

    place = Path(corpus.name).expanduser()
    is_local = place.is_dir()
    offline = f"corpora that work offline: {', '.join(OFFLINE)}"
    if not is_local and not hub.is_reachable():
        raise UserError(f"no folder {corpus.name!r} here and the hub cannot be reached; {offline}")
    source = str(place) if is_local else corpus.name
    wanted = getattr(corpus, split)
    try:
        rows = datasets.load_dataset(source, corpus.config, split=wanted, streaming=True)
    except (OSError, ValueError) as error:  # no such data set, config or split; no connection
        where = "" if is_local else f"; {offline}"
        raise UserError(f"cannot load {wanted!r} of {corpus.name!r}: {error}{where}") from error
    return (_row_text(row, corpus.column) + "\n\n" for row in rows)


def _row_text(row: dict, column: str) -> str:
    """The text of one row: a string as it is; of a conversation its turns, a line each."""
    if column not in row:
        raise UserError(
            f"no column {column!r}: this data set has {', '.join(row)} (hub:NAME:CONFIG:COLUMN)"
        )
    value = row[column]
    if isinstance(value, list) and all(
        isinstance(turn, dict) and "content" in turn for turn in value
    ):
        value = "\n".join(turn["content"] for turn in value)
    if not isinstance(value, str):
        raise UserError(
            f"column {column!r} holds {type(value).__name__}, not text: name another column"
        )
    return value.rstrip("\n")


_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


@lru_cache(maxsize=1)
def _moses():
    try:
        import sacremoses
    except ImportError as error:
        raise UserError("marked: needs sacremoses (pip install 'kvalign[pretrain]')") from error
    return sacremoses.MosesTokenizer("en")


def _mark(text: str) -> str:
    """Text the way WikiText writes it: Moses tokens, `@-@` in words, `@,@` and `@.@` in numbers."""
    lines = []
    for line in text.translate(_QUOTES).split("\n"):
        line = _moses().tokenize(line, aggressive_dash_splits=True, return_str=True, escape=False)
        lines.append(f" {line} " if line else " ")
    return re.sub(r"(?<=\d)([,.])(?=\d)", r" @\1@ ", "\n".join(lines))
