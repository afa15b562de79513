"""Passages cut into readable and unreadable chunks: for strips on a page and in a terminal."""

from dataclasses import dataclass

from kvalign.eval.evaluation import Document, Row
from kvalign.eval.rows import label_of, method_name


@dataclass(frozen=True)
class Piece:
    """A chunk of a passage with what follows it up to the next."""

    text: str
    num_tokens: int
    num_known: int
    is_readable: bool


@dataclass(frozen=True)
class Passage:
    """What one method wrote: text before the first token, and the chunks."""

    method: str
    label: str
    readable: float
    head: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Panel:
    """The passages of all methods for one prompt, side by side."""

    title: str
    prompt: str
    passages: list[Passage]


def panels_of(document: Document) -> list[Panel]:
    """One for each cache size, n-gram rule and prompt of a readability document."""
    groups: dict[tuple[int, int, int], list[Passage]] = {}
    for row in document["rows"]:
        key = (row["cache_size"], row["no_repeat_ngram_size"], row["prompt"])
        groups.setdefault(key, []).append(_passage(row))
    model = document["settings"]["model"]
    return [
        Panel(
            f"{model}, C = {cache_size}, prompt {prompt + 1}"
            + (f", no repeated {ngram}-gram" if ngram else ""),
            document["prompts"][prompt],
            passages,
        )
        for (cache_size, ngram, prompt), passages in groups.items()
    ]


def _passage(row: Row) -> Passage:
    text, chunks = row["text"], row["chunks"]
    starts = [chunk[0] for chunk in chunks]
    ends = [*starts[1:], len(text)][: len(chunks)]
    return Passage(
        method_name(row),
        label_of(row),
        row["readable"],
        text[: starts[0]] if starts else text,
        [
            Piece(text[start:end], num_tokens, num_known, is_readable)
            for (start, _, num_tokens, num_known, is_readable), end in zip(
                chunks, ends, strict=True
            )
        ],
    )
