"""Streams of `kvalign eval needle`: a text with codes near its beginning, as tokens.

A code is tokenised apart from the text around it, in the stream and in an answer alike. So an
answer has the same tokens as the text, whatever a tokenizer would merge.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.needle import NAMES, NeedleSettings
from kvalign.eval.protocol.questions import Stop
from kvalign.methods.base import Method
from kvalign.models.loading import LoadedModel
from kvalign.models.prefix_tokens import prefix_ids
from kvalign.models.text_ids import ids_of
from kvalign.streaming.health import check_losses


@dataclass(frozen=True)
class Needle:
    """Code in a stream.

    Attributes:
        end: number of tokens of the stream up to its end.
        question: asks for it.
        code: the answer.
    """

    end: int
    question: list[int]
    code: list[int]


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
            room = len(needle.question) + len(needle.code)
            stops.append(Stop(distance, self.ids[num_read:end], [needle], room))
            num_read = end
        return stops


def haystacks(settings: NeedleSettings, loaded: LoadedModel) -> list[Haystack]:
    """Streams of the settings, each with other text, long enough for the largest cache.

    Raises:
        UserError: a corpus that is too short.
    """
    tokenizer, rng = loaded.tokenizer, random.Random(settings.seed)
    farthest = max(settings.distances) * max(settings.cache_sizes)
    num_ids = settings.num_streams * (settings.num_needles * settings.gap + farthest)
    smaller = "--distances, --gap, --num-needles or --num-streams"
    text = iter(first_ids(settings.corpus, tokenizer, num_ids, smaller))

    def ids(text: str) -> list[int]:
        return ids_of(text, tokenizer, prefix=False, goes_on=True)

    haystacks = []
    for _ in range(settings.num_streams):
        stream, needles = prefix_ids(tokenizer), []
        for name in rng.sample(NAMES, settings.num_needles):
            code = ids(f" {rng.randrange(10_000, 100_000)}")
            question = ids(f"\n The secret code of the {name} is")
            again = ids(f" . Remember : the secret code of the {name} is")
            sentences = [*question, *code, *again, *code, *ids(" . \n")]
            stream = [*stream, *islice(text, settings.gap), *sentences]
            needles.append(Needle(len(stream), question, code))
        haystacks.append(Haystack([*stream, *islice(text, farthest)], needles))
    return haystacks


def writes_code(method: Method, needle: Needle) -> dict[str, bool]:
    """Return whether greedy decoding writes a code when it is asked for."""
    new = needle.question
    for token in needle.code:
        logits = method.feed(torch.tensor([new], device=method.model.device))[0].float()
        check_losses(-logits.log_softmax(-1)[needle.code], method, most=math.inf)
        if int(logits.argmax()) != token:
            return {"accuracy": False}
        new = [token]
    return {"accuracy": True}
