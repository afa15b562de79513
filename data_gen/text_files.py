"""The corpus `text:PATH`: text files of one's own."""

import glob
from collections.abc import Iterator
from pathlib import Path

from kvalign.data_gen.corpus import in_pieces, load_rows
from kvalign.errors import NotFoundError


class TextFiles:
    about = "a file, a folder of .txt files or a glob; one text for both splits"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """The files' text, in the order of their names.

        Raises:
            NotFoundError: no file matches.
        """
        path = Path(rest).expanduser()
        if path.is_dir():
            files = sorted(path.rglob("*.txt"))
        else:
            files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path))))
        escaped = [glob.escape(str(file)) for file in files if file.is_file()]  # `datasets` globs
        if not escaped:
            raise NotFoundError(
                f"no text at {rest!r}: name a file, a folder with .txt files, or a glob"
            )
        rows = load_rows(
            "text", data_files=escaped, split="train", keep_linebreaks=True, about=f"text:{rest}"
        )
        return in_pieces(row["text"] for row in rows)
