"""Corpora: the base class, how rows become pieces of text, and those that need few lines."""

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import TEXT

PIECE_LEN = 1 << 20  # characters in memory at once
# Of the corpus `recall`, in tokens.
RECALL_LEN = {"train": 1_000_000, "test": 200_000}
RECALL_LINE_LEN = 64
_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


class Corpus(Protocol):
    """A source of text."""

    @property
    def about(self) -> str:
        """Description in half a line for `kvalign corpora`."""

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


class Recall:
    """The corpus `recall`: a stream of facts and questions (`kvalign.data_gen.facts`) as text."""

    about = "facts, questions and answers for the models recall-gpt2 and recall-llama; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """One stream for each split, `RECALL_LINE_LEN` tokens a line."""
        from kvalign.data_gen.facts import WORDS, FactStreams  # numpy

        stream = FactStreams(seed=int(split == "test"))
        num_lines = RECALL_LEN[split] // RECALL_LINE_LEN
        lines = (stream.take(RECALL_LINE_LEN)[0] for _ in range(num_lines))
        return in_pieces(" ".join(WORDS[i] for i in line) + "\n" for line in lines)


class Marked:
    """The corpora `marked:SPEC`: any other corpus in WikiText's tokenised form."""

    about = "any other corpus in WikiText's tokenised form (`it 's a two @-@ part word`)"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """Text of the corpus `rest`, marked a piece at a time."""
        from kvalign.data_gen.corpora import texts  # whose registry names this module

        return map(_mark, texts(rest, split))


@lru_cache(maxsize=1)
def _moses() -> Any:
    try:
        import sacremoses
    except ImportError as error:
        raise UserError("marked: needs sacremoses (pip install 'kvalign[pretrain]')") from error
    return sacremoses.MosesTokenizer("en")


def _mark(text: str) -> str:
    """Text as WikiText has it: Moses tokens, `@-@` in words, `@,@` and `@.@` in numbers."""
    lines = []
    for line in text.translate(_QUOTES).split("\n"):
        line = _moses().tokenize(line, aggressive_dash_splits=True, return_str=True, escape=False)
        lines.append(f" {line} " if line else " ")
    return re.sub(r"(?<=\d)([,.])(?=\d)", r" @\1@ ", "\n".join(lines))
