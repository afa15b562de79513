"""Needle: codes hidden in a real text, each asked for some distance later.

    ... text ... The secret code of the red door is 48213 . Remember : ... 48213 . ... text ...
    The secret code of the red door is                       asked for 1, 4, 16, 64 C later

After G. Kamradt's needle in a haystack (2023), adapted to streams: the distance counts, since an
endless text has no length.

Other kinds of questions are those of RULER (Hsieh et al. 2024, arXiv 2404.06654) that need no data
set (`kinds`), with few keys, values and hops, and short lists, so that small models can answer; and
with its score: the share of the expected answers that a written one contains.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kvalign.data_gen.corpus import OWNERS
from kvalign.eval.protocol import (
    METHODS_AND_DENSE,
    DrawnSettings,
    Evaluation,
    corpus_option,
    seed_option,
)
from kvalign.eval.protocol.data import Column, Document, Drawing, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ROWS, MOST_SIZE, option

if TYPE_CHECKING:
    from kvalign.eval.protocol.questions import Ask, Stop
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel

NUM_VALUES, NUM_HOPS, NUM_COMMON, NUM_FREQUENT = 4, 4, 10, 3
COMMON_TIMES = 6
"""Times that a list has a common word; others are there once."""
TIMES = [round(24 / rank**1.5) for rank in range(1, 9)]
"""Times that a text has each coded word: 24, 8, 5, 3, 2, 2, 1, 1, by Zipf's law."""
LETTERS = 5  # of a coded word or variable
WORDS = (
    "apple army baby bank bird blood bread bridge camera castle chair church city coffee country "
    "daughter desk doctor dream engine farm finger fish forest friend garden glass gold heart hill "
    "horse island judge king lake letter lion market milk money mountain music north ocean paper "
    "party pencil picture queen rain river school shoe snow song stone storm student summer table "
    "teacher tree village window winter world"
)


class Hidden(NamedTuple):
    """Passage in pieces, each tokenised alone, as its answers are; and the question for them."""

    passage: list[str]
    question: str
    answers: list[str]


def _code(rng: random.Random) -> str:
    return f" {rng.randrange(10_000, 100_000)}"


def _coded(num: int, rng: random.Random) -> list[str]:
    return [f" {''.join(rng.choices(string.ascii_uppercase, k=LETTERS))}" for _ in range(num)]


def _told(codes: dict[str, str]) -> list[str]:
    """Sentences, sorted by names: those were drawn, so the first that was drawn is anywhere."""
    pieces = list[str]()
    for name, code in sorted(codes.items()):
        again = f" . Remember : the secret code of the {name} is"
        pieces += [f"\n The secret code of the {name} is", code, again, code, " . \n"]
    return pieces


def one_code(names: list[str], rng: random.Random) -> Hidden:
    codes, owner = {name: _code(rng) for name in names}, names[0]
    return Hidden(_told(codes), f"\n The secret code of the {owner} is", [codes[owner]])


def all_codes(names: list[str], rng: random.Random) -> Hidden:
    codes = {name: _code(rng) for name in names}
    owners = f"{', the '.join(names[:-1])} and the {names[-1]}"
    question = f"\n The secret codes of the {owners} are , in this order :"
    return Hidden(_told(codes), question, list(codes.values()))


def all_values(names: list[str], rng: random.Random) -> Hidden:
    codes, begin = [_code(rng) for _ in range(NUM_VALUES)], "One of the secret codes of the"
    passage = [piece for code in codes for piece in (f"\n {begin} {names[0]} is", code, " .")]
    question = f"\n The secret codes of the {names[0]} are all of these :"
    return Hidden([*passage, " \n"], question, codes)


def variables(names: list[str], rng: random.Random) -> Hidden:
    value, chain = _code(rng), _coded(1 + NUM_HOPS, rng)
    passage = ["\n VAR", chain[0], " =", value, " ."]
    for old, new in pairwise(chain):
        passage += ["\n VAR", new, " = VAR", old, " ."]
    question = f"\n The {len(chain)} variables that have the value{value} are VAR"
    return Hidden([*passage, " \n"], question, chain)


def common_words(names: list[str], rng: random.Random) -> Hidden:
    words = [f" {word}" for word in WORDS.split()]
    rng.shuffle(words)
    common = words[:NUM_COMMON]
    passage = common * COMMON_TIMES + words[NUM_COMMON:]
    rng.shuffle(passage)
    question = f"\n The {NUM_COMMON} most common words of the list :"
    return Hidden(["\n List of words :", *passage, " . \n"], question, common)


def frequent_words(names: list[str], rng: random.Random) -> Hidden:
    words = _coded(len(TIMES), rng)
    passage = [word for word, times in zip(words, TIMES, strict=True) for _ in range(times)]
    rng.shuffle(passage)
    question = f"\n The {NUM_FREQUENT} most common words of the coded text are the words"
    return Hidden(["\n Coded text :", *passage, " . \n"], question, words[:NUM_FREQUENT])


KINDS: dict[str, tuple[int, Callable[[list[str], random.Random], Hidden]]] = {
    "single": (1, one_code),
    "multi-key": (4, one_code),
    "multi-value": (1, all_values),
    "multi-query": (4, all_codes),
    "variable-tracking": (0, variables),
    "common-words": (0, common_words),
    "frequent-words": (0, frequent_words),
}
"""How many names a passage of each kind is about, and what makes it and its question from them."""


@dataclass(frozen=True, kw_only=True)
class NeedleSettings(DrawnSettings):
    """Hide codes in a real text, and ask for each some distance later: how far back a stream can
    read. For models that copy from their context (`--model smollm2-135m-instruct`).

    Example:
        kvalign eval needle --cache-sizes 32 --distances 1,4 --num-streams 2
    """

    methods: tuple[str, ...] = METHODS_AND_DENSE
    corpus: str = corpus_option("the text around the codes")
    distances: tuple[int, ...] = option(
        (1, 4, 16, 64),
        help="distances from a code to its question, in cache sizes, a row each",
        at_least=0,
        at_most=MOST_SIZE,
    )
    kinds: tuple[str, ...] = option(
        ("single",), help="kinds of questions, RULER's, a row each, comma-separated", choices=KINDS
    )
    num_needles: int = option(
        1,
        help="codes (of other kinds: passages) of a stream, near its beginning; small models "
        "confuse several",
        at_least=1,
        at_most=len(OWNERS) // max(num for num, _ in KINDS.values()),
    )
    gap: int = option(100, help="tokens of text before each code", at_least=0, at_most=MOST_SIZE)
    num_streams: int = option(
        10, help="streams, each with its own text", at_least=1, at_most=MOST_ROWS
    )
    seed: int = seed_option("the codes, the same for each method")


@measures(NeedleSettings)
def needle(settings: NeedleSettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Let every method read the same streams, and count the codes that it finds.

    Returns:
        A document whose rows have the sizes, `COLUMNS` (no kind if all are `single`) and what
        `rows_of` says of questions.

    Raises:
        UserError: a corpus that is too short, a tokenizer that cannot write words.
    """
    from kvalign.eval.protocol.questions import ask_all

    progress.phase(f"reading {settings.corpus}")
    by_kind, distances = haystacks(settings, loaded), set(settings.distances)

    def streams_for(size: int) -> list[list[Stop[Needle]]]:
        return [
            stream.stops(distances, size, ask, {"kind": kind} if several else {})
            for kind, streams in by_kind.items()
            for stream in streams
        ]

    several, ask = {*by_kind} != {"single"}, asker(loaded)
    return ask_all(methods, streams_for, "questions")


NUM_NEW = 48
"""Tokens that are written in answer to a question, of all kinds but `single`."""


@dataclass(frozen=True)
class Needle:
    """Code in a stream, or a passage with several answers.

    Attributes:
        end: number of tokens of the stream up to its end.
        question: asks for it.
        answers: all that are expected.
        num_new: tokens to write, at most.
    """

    end: int
    question: list[int]
    answers: list[list[int]]
    num_new: int


@dataclass(frozen=True)
class Haystack:
    """A stream as tokens, up to the last question, and its codes in order."""

    ids: list[int]
    needles: list[Needle]

    def stops(
        self, distances: Iterable[int], cache_size: int, ask: Ask[Needle], of_kind: Row
    ) -> list[Stop[Needle]]:
        """Places where each code is asked for: at each distance, in cache sizes, from its end."""
        from kvalign.eval.protocol.questions import Stop

        places = [(x.end + d * cache_size, d, x) for x in self.needles for d in distances]
        stops, num_read = list[Stop[Needle]](), 0
        for end, distance, needle in sorted(places, key=itemgetter(0, 1)):
            room = len(needle.question) + needle.num_new
            at = {"distance": distance, **of_kind, "distance_tokens": distance * cache_size}
            stops.append(Stop(at, [self.ids[num_read:end]], [needle], ask, room))
            num_read = end
        return stops


def haystacks(settings: NeedleSettings, loaded: LoadedModel) -> dict[str, list[Haystack]]:
    """Streams of each kind, each with other text, long enough for the largest cache. Those of a
    kind do not depend on which others there are. An answer is tokenised apart from the text around
    it, in the stream and after a question alike, so that it has the same tokens in both.

    Raises:
        UserError: a corpus that is too short, a tokenizer that cannot write words.
    """
    from kvalign.data_gen.corpora import first_ids
    from kvalign.models.input_ids import ids_of, prefix_ids

    tokenizer = loaded.tokenizer

    def ids(text: str) -> list[int]:
        return ids_of(text, tokenizer, prefix=False, goes_on=True)

    if tokenizer.decode(ids(" red 48213")).strip() != "red 48213":
        raise UserError(
            "this model's tokenizer cannot write words and codes: use a model of ordinary text "
            "(kvalign eval recall asks a model that was trained on facts)"
        )
    farthest = max(settings.distances) * max(settings.cache_sizes)
    num_ids = settings.num_streams * (settings.num_needles * settings.gap + farthest)
    smaller = "--distances, --gap, --num-needles or --num-streams"
    text_ids = first_ids(settings.corpus, tokenizer, num_ids, smaller)

    def of_kind(kind: str) -> Iterator[Haystack]:
        text, rng, (num_names, hide) = iter(text_ids), random.Random(settings.seed), KINDS[kind]
        for _ in range(settings.num_streams):
            stream, needles = prefix_ids(tokenizer), []
            names = iter(rng.sample(OWNERS, num_names * settings.num_needles))
            for _ in range(settings.num_needles):
                hidden = hide(list(islice(names, num_names)), rng)
                stream = [*stream, *islice(text, settings.gap)]
                stream += [token for piece in hidden.passage for token in ids(piece)]
                answers = [ids(answer) for answer in hidden.answers]
                num_new = len(answers[0]) if kind == "single" else NUM_NEW
                needles.append(Needle(len(stream), ids(hidden.question), answers, num_new))
            yield Haystack([*stream, *islice(text, farthest)], needles)

    return {kind: list(of_kind(kind)) for kind in settings.kinds}


def asker(loaded: LoadedModel) -> Ask[Needle]:
    """Function that asks a question: the share of its answers that greedy decoding writes, which is
    RULER's score. A code must be written at once (`num_new`).
    """
    import torch

    from kvalign.streaming.scoring import check_losses

    decode = loaded.tokenizer.decode

    def ask(method: Method, needle: Needle) -> dict[str, float]:
        answers = [decode(ids).strip().lower() for ids in needle.answers]
        new, written, share = needle.question, list[int](), 0.0
        while share < 1 and len(written) < needle.num_new:
            logits = method.feed(torch.tensor([new], device=method.model.device))[0].float()
            new = [int(logits.argmax())]
            check_losses(-logits.log_softmax(-1)[new], method, most=math.inf)
            written += new
            text = decode(written).lower()
            share = sum(answer in text for answer in answers) / len(answers)
        return {"accuracy": share}

    return ask


COLUMNS = {
    "kind": Column("kind", None, about="of question, RULER's"),
    "distance": Column("distance", about="from the code to its question, in cache sizes"),
    "accuracy": share_column(
        "accuracy",
        "found",
        "codes that greedy decoding writes with all digits; of other kinds, expected answers that "
        "48 tokens of it contain",
    ),
    "distance_tokens": Column("tokens back", about="from the code to its question"),
}


class NeedleEvaluation(Evaluation):
    settings = NeedleSettings
    run = staticmethod(needle)
    heading = "Needle in a stream"
    about = (
        "Codes of five digits are hidden in a text, and each is asked for some distance later, "
        "on a copy of the stream. An answer is right if greedy decoding writes all digits. "
        "None is right by chance. Other kinds of questions are RULER's: the figure is the share of "
        "the expected answers that 48 tokens of greedy decoding contain."
    )
    over = "distance"
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing:
        """Heat map for each cache size and kind: methods, distances, and the share found."""
        from pandas import DataFrame

        from kvalign.eval.drawing import draw_shares

        title, rows, panels = self.title(document), document["rows"], {}
        distances = sorted({row["distance"] for row in rows})
        groups = grouped(rows, lambda row: (row["cache_size"], row.get("kind")))
        for (size, kind), group in groups.items():
            name = f"{title}, C = {size}" + (f", {kind}" if kind else "")
            points = [row | {"label": label_of(row), "at": f"{row['distance']} C"} for row in group]
            shares = DataFrame(points).pivot_table("accuracy", "label", "at", sort=False)
            panels[name] = shares.reindex(columns=[f"{d} C" for d in distances])
        quantity = "answers found" if rows[0].get("kind") else "codes found"
        figure = draw_shares(panels, x=f"from what is hidden to its question; {quantity} in %")
        return figure, f"{quantity.capitalize()}, %: {title}"


EVALUATION = NeedleEvaluation()
