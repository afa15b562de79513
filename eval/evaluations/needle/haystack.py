"""Streams of `kvalign eval needle`: a text with codes near its beginning, as tokens.

A code, or any other answer, is tokenised apart from the text around it, in the stream and in an
answer alike. So an answer has the same tokens as the text, whatever a tokenizer would merge.

The kinds of questions are those of RULER (Hsieh et al. 2024, arXiv 2404.06654), with few keys,
values and hops, and short lists, so that small models can answer.
"""

import math
import random
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random
from typing import NamedTuple

import torch

from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.needle import KINDS, NAMES, NeedleSettings
from kvalign.eval.protocol.questions import Ask, Stop
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.input_ids import ids_of, prefix_ids
from kvalign.models.loading import LoadedModel
from kvalign.streaming.scoring import check_losses

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

    def stops(self, distances: Iterable[int], cache_size: int) -> list[Stop[Needle]]:
        """Places where each code is asked for: at each distance, in cache sizes, from its end."""
        pairs = [(needle, distance) for needle in self.needles for distance in distances]
        stops, num_read = list[Stop[Needle]](), 0
        for end, distance, needle in sorted(
            ((needle.end + distance * cache_size, distance, needle) for needle, distance in pairs),
            key=lambda stop: stop[:2],
        ):
            room = len(needle.question) + needle.num_new
            stops.append(Stop(distance, self.ids[num_read:end], [needle], room))
            num_read = end
        return stops


def haystacks(settings: NeedleSettings, loaded: LoadedModel) -> dict[str, list[Haystack]]:
    """Streams of each kind, each with other text, long enough for the largest cache. Those of a
    kind do not depend on which others there are.

    Raises:
        UserError: a corpus that is too short, a tokenizer that cannot write words.
    """
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
        text, rng, num_names = iter(text_ids), random.Random(settings.seed), KINDS[kind]
        for _ in range(settings.num_streams):
            stream, needles = prefix_ids(tokenizer), []
            names = iter(rng.sample(NAMES, num_names * settings.num_needles))
            for _ in range(settings.num_needles):
                hidden = HIDE[kind](list(islice(names, num_names)), rng)
                stream = [*stream, *islice(text, settings.gap)]
                stream += [token for piece in hidden.passage for token in ids(piece)]
                answers = [ids(answer) for answer in hidden.answers]
                num_new = len(answers[0]) if kind == "single" else NUM_NEW
                needles.append(Needle(len(stream), ids(hidden.question), answers, num_new))
            yield Haystack([*stream, *islice(text, farthest)], needles)

    return {kind: list(of_kind(kind)) for kind in settings.kinds}


def asker(kind: str, loaded: LoadedModel) -> Ask[Needle]:
    """Function that asks a question of this kind and says how much of its answers greedy decoding
    writes: of a code all digits at once, else the share of answers somewhere in the text (RULER's
    score).
    """

    def writes_code(method: Method, needle: Needle) -> dict[str, float]:
        pairs = zip(needle.answers[0], written(method, needle), strict=False)
        return {"accuracy": all(token == new for token, new in pairs)}

    def share_written(method: Method, needle: Needle) -> dict[str, float]:
        answers = [loaded.tokenizer.decode(ids).strip().lower() for ids in needle.answers]
        share, new = 0.0, list[int]()
        for token in written(method, needle):
            new.append(token)
            text = loaded.tokenizer.decode(new).lower()
            share = sum(answer in text for answer in answers) / len(answers)
            if share == 1:
                break
        return {"accuracy": share}

    return writes_code if kind == "single" else share_written


def written(method: Method, needle: Needle) -> Iterator[int]:
    """The tokens of greedy decoding after a question."""
    new = needle.question
    for _ in range(needle.num_new):
        logits = method.feed(torch.tensor([new], device=method.model.device))[0].float()
        new = [int(logits.argmax())]
        check_losses(-logits.log_softmax(-1)[new], method, most=math.inf)
        yield new[0]


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


def _code(rng: Random) -> str:
    return f" {rng.randrange(10_000, 100_000)}"


def _coded(num: int, rng: Random) -> list[str]:
    return [f" {''.join(rng.choices(string.ascii_uppercase, k=LETTERS))}" for _ in range(num)]


def _told(codes: dict[str, str]) -> list[str]:
    """Sentences, sorted by names: those were drawn, so the first that was drawn is anywhere."""
    pieces = list[str]()
    for name, code in sorted(codes.items()):
        again = f" . Remember : the secret code of the {name} is"
        pieces += [f"\n The secret code of the {name} is", code, again, code, " . \n"]
    return pieces


def one_code(names: list[str], rng: Random) -> Hidden:
    """Codes of names, and the question for one of them."""
    codes, asked = {name: _code(rng) for name in names}, names[0]
    return Hidden(_told(codes), f"\n The secret code of the {asked} is", [codes[asked]])


def all_codes(names: list[str], rng: Random) -> Hidden:
    """The same, and the question for all of them."""
    codes = {name: _code(rng) for name in names}
    asked = f"{', the '.join(names[:-1])} and the {names[-1]}"
    question = f"\n The secret codes of the {asked} are , in this order :"
    return Hidden(_told(codes), question, list(codes.values()))


def all_values(names: list[str], rng: Random) -> Hidden:
    """Several codes of one name."""
    codes, begin = [_code(rng) for _ in range(NUM_VALUES)], "One of the secret codes of the"
    passage = [piece for code in codes for piece in (f"\n {begin} {names[0]} is", code, " .")]
    question = f"\n The secret codes of the {names[0]} are all of these :"
    return Hidden([*passage, " \n"], question, codes)


def variables(names: list[str], rng: Random) -> Hidden:
    """A variable with a value, and others that get it from each other."""
    value, chain = _code(rng), _coded(1 + NUM_HOPS, rng)
    passage = ["\n VAR", chain[0], " =", value, " ."]
    for old, new in pairwise(chain):
        passage += ["\n VAR", new, " = VAR", old, " ."]
    question = f"\n The {len(chain)} variables that have the value{value} are VAR"
    return Hidden([*passage, " \n"], question, chain)


def common_words(names: list[str], rng: Random) -> Hidden:
    """A list of words of which some occur often."""
    words = [f" {word}" for word in WORDS.split()]
    rng.shuffle(words)
    common = words[:NUM_COMMON]
    passage = common * COMMON_TIMES + words[NUM_COMMON:]
    rng.shuffle(passage)
    question = f"\n The {NUM_COMMON} most common words of the list :"
    return Hidden(["\n List of words :", *passage, " . \n"], question, common)


def frequent_words(names: list[str], rng: Random) -> Hidden:
    """Coded words, each less frequent than the one before."""
    words = _coded(len(TIMES), rng)
    passage = [word for word, times in zip(words, TIMES, strict=True) for _ in range(times)]
    rng.shuffle(passage)
    question = f"\n The {NUM_FREQUENT} most common words of the coded text are the words"
    return Hidden(["\n Coded text :", *passage, " . \n"], question, words[:NUM_FREQUENT])


HIDE: dict[str, Callable[[list[str], Random], Hidden]] = {
    "single": one_code,
    "multi-key": one_code,
    "multi-value": all_values,
    "multi-query": all_codes,
    "variable-tracking": variables,
    "common-words": common_words,
    "frequent-words": frequent_words,
}
"""By kind what makes a passage and its question from names, which some kinds need."""
