"""Streams of `kvalign eval needle`: a text with codes near its beginning, as tokens.

A code, or any other answer, is tokenised apart from the text around it, in the stream and in an
answer alike. So an answer has the same tokens as the text, whatever a tokenizer would merge.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.needle import KINDS, NAMES, NeedleSettings
from kvalign.eval.evaluations.needle.kinds import HIDE
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
