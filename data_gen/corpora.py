"""Text to record, train and evaluate on: one specification string for each corpus.

`SPECS` lists them, as `kvalign list corpora` does. A new one is a class (`corpus.Corpus`) in a file
and a line in `_KINDS` here; a short name for a hub data set is a line in `corpus.HUB`. A tokenised
corpus is one stream of ids: no special tokens, rows joined.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.data_gen.corpus import HUB, Corpus, sha256_of
from kvalign.foundation import hub
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import Registry, unknown
from kvalign.foundation.settings import typed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


class Marked:
    """The corpora `marked:SPEC`: any other corpus in WikiText's tokenised form."""

    about = "any other corpus in WikiText's tokenised form (`it 's a two @-@ part word`)"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """Text of the corpus `rest`, marked a piece at a time."""
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


_KINDS: Registry[type[Corpus]] = Registry(
    "corpus",
    {
        "python-docs": "kvalign.data_gen.python_texts:PythonDocs",
        "python-source": "kvalign.data_gen.python_texts:PythonSource",
        "python-source:MB": "kvalign.data_gen.python_texts:PythonSource",
        "recall": "kvalign.data_gen.corpus:RecallFacts",
        "text:PATH": "kvalign.data_gen.corpus:TextFiles",
        "hub:NAME[:CONFIG][:COLUMN]": "kvalign.data_gen.corpus:AnyHubDataset",
        "marked:SPEC": "kvalign.data_gen.corpora:Marked",
    },
)
CORPORA: dict[str, Corpus] = {**{form: kind() for form, kind in _KINDS.items()}, **HUB}
SPECS = {form: corpus.about for form, corpus in CORPORA.items()}
NAMES = tuple(SPECS)

# A text can be cut after the last of these newlines: no tokenizer that splits words by one of the
# usual patterns (GPT-2, Llama 3, o200k) has a token across it, or one that differs at a text's end.
_CUT = re.compile(r"(?s).*(?:(?<=\S)\n(?=\w)|\n(?= \w))")


def texts(spec: str, split: str = "train") -> Iterator[str]:
    """Yield the text of a corpus in pieces of about a megabyte, which add up to the whole.

    Args:
        spec: one of `SPECS`.
        split: `train` or `test`. A `text:` corpus is the same in both: separate the two yourself.

    Raises:
        UserError: an unknown corpus, split or column, or a hub that cannot be reached (the message
            names the corpora that work offline).
        NotFoundError: `text:` with a path that matches nothing.
    """
    if split not in ("train", "test"):
        raise UserError(f"split must be train or test, got {split!r}")
    spec = typed("corpus", spec, str)
    if spec in CORPORA and ":" not in spec:
        return CORPORA[spec].texts("", split)
    kind, _, rest = spec.partition(":")
    for form, corpus in CORPORA.items():
        if rest and form.startswith(f"{kind}:"):
            return corpus.texts(rest, split)
    if Path(spec).exists():
        raise UserError(f"unknown corpus {spec!r}: that is a path, write text:{spec}")
    raise UserError(unknown("corpus", spec, NAMES))


def token_pieces(
    spec: str, tokenizer: "PreTrainedTokenizerBase", split: str = "train", num_threads: int = 1
) -> Iterator[list[int]]:
    """Yield the ids of `texts(spec, split)`, about a megabyte of text at a time, without prefix
    tokens. They are the ids of the whole text. So many threads read ahead of what is asked for.
    """
    from kvalign.models.input_ids import ids_of  # transformers

    def pieces() -> Iterator[str]:
        uncut = ""
        for text in texts(spec, split):
            uncut += text
            if cut := _CUT.match(uncut):
                yield uncut[: cut.end()]
                uncut = uncut[cut.end() :]
        if uncut:
            yield uncut

    with ThreadPoolExecutor(num_threads) as pool:
        read = deque[Future[list[int]]]()
        for number, piece in enumerate(pieces()):
            read.append(pool.submit(ids_of, piece, tokenizer, prefix=False, goes_on=number > 0))
            if len(read) == num_threads:
                yield read.popleft().result()
        while read:
            yield read.popleft().result()


def some_ids(
    spec: str,
    tokenizer: "PreTrainedTokenizerBase",
    num_ids: int,
    *,
    start: int = 0,
    split: str = "train",
) -> list[int]:
    """Ids of a corpus, so many from one on; fewer if it ends before."""
    ids = chain.from_iterable(token_pieces(spec, tokenizer, split))
    return [*islice(ids, start, start + num_ids)]


def first_ids(
    spec: str, tokenizer: "PreTrainedTokenizerBase", num_ids: int, or_smaller: str
) -> list[int]:
    """First ids of a corpus's test part, so many; UserError, which names what could be smaller, if
    it has fewer.
    """
    ids = some_ids(spec, tokenizer, num_ids, split="test")
    if len(ids) < num_ids:
        raise UserError(
            f"corpus {spec!r} is too short: it has {len(ids)} tokens, {num_ids} are needed: name a "
            f"longer text, or smaller {or_smaller}"
        )
    return ids


def equal_shares(corpora: Sequence[Iterable[list[int]]], num_tokens: int) -> Iterator[list[int]]:
    """First ids of each corpus, `num_tokens` in all, one corpus after the other."""
    for i, pieces in enumerate(corpora):
        num_left = num_tokens * (i + 1) // len(corpora) - num_tokens * i // len(corpora)
        for piece in pieces:
            yield piece[:num_left]
            num_left -= min(num_left, len(piece))
            if not num_left:
                break


def cut_chunks(pieces: Iterable[list[int]], chunk_len: int, stride: int) -> Iterator[list[int]]:
    """Cut ids into chunks, one every `stride` ids (at most chunk_len)."""
    uncut: list[int] = []
    for piece in pieces:
        uncut += piece
        start = 0
        while len(uncut) - start >= chunk_len:
            yield uncut[start : start + chunk_len]
            start += stride
        del uncut[:start]


def hub_datasets(specs: Sequence[str]) -> list[str]:
    """Ids of the hub's data sets among corpora, sorted; a name with a folder here is not one."""
    ids = set()
    for spec in specs:
        spec = spec.removeprefix("marked:")
        kind, _, rest = spec.partition(":")
        name = HUB[spec].name if spec in HUB else rest.partition(":")[0] * (kind == "hub")
        if hub.is_id(name) and not Path(name).expanduser().exists():
            ids.add(name)
    return sorted(ids)


def text_sha256(specs: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of the local texts among corpora: of the concatenated files of each
    `text:`, by the corpus without `marked:`.
    """
    names = [spec.removeprefix("marked:") for spec in specs]
    return {n: sha256_of(n.removeprefix("text:")) for n in names if n.startswith("text:")}
