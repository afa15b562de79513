"""The corpora `text:PATH`: text files of a user."""

import glob
from collections.abc import Iterator
from pathlib import Path

from kvalign.data_gen.corpus import in_pieces
from kvalign.errors import NotFoundError, UserError


class TextFiles:
    about = "a file, a folder of .txt files or a glob; one text for both splits"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """The files' text, in the order of their names.

        Raises:
            NotFoundError: no file matches.
            UserError: a file is not UTF-8; raised when it is reached.
        """
        path = Path(rest).expanduser()
        paths = path.rglob("*.txt") if path.is_dir() else map(Path, glob.glob(str(path)))
        files = [path] if path.is_file() else sorted(filter(Path.is_file, paths), key=str)
        if not files:
            raise NotFoundError(
                f"no text at {rest!r}: name a file, a folder with .txt files, or a glob"
            )
        return in_pieces(_lines(files))


def _lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            with file.open(encoding="utf-8") as lines:
                yield from lines
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text: {error}") from None
