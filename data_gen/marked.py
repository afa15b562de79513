"""The corpora `marked:SPEC`, in WikiText's tokenised form."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from kvalign.foundation.errors import UserError

_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


class Marked:
    """The corpora `marked:SPEC`: any other corpus in WikiText's tokenised form."""

    about = "any other corpus in WikiText's tokenised form (`it 's a two @-@ part word`)"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """Text of the corpus `rest`, marked a piece at a time; UserError for a corpus that is
        already marked.
        """
        from kvalign.data_gen.corpora import texts  # whose registry names this module

        if rest.startswith("marked:"):
            raise UserError("marked: takes another corpus, got marked: again")
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
