"""Conversations of `kvalign eval told`: facts, other talk and questions as tokens."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile

import torch
from transformers import PreTrainedTokenizerBase

from kvalign.data_gen.corpora import cut_chunks, token_pieces
from kvalign.eval.evaluations.told import ToldSettings
from kvalign.eval.protocol.questions import Stop
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.input_ids import ids_of
from kvalign.models.loading import LoadedModel
from kvalign.streaming.scoring import check_losses
from kvalign.streaming.turns import turn_ids

# How a fact begins, its question, and what may stand at its end: words of different first letters.
FACTS = (
    (
        "The ship in the harbour is called",
        "What is the ship in the harbour called?",
        "Aurora Falcon Marigold Neptune Phoenix Seagull Titan Victory",
    ),
    (
        "The captain of the ship was born in",
        "Where was the captain of the ship born?",
        "Athens Cairo Dublin Lisbon Moscow Naples Toronto Vienna",
    ),
    (
        "The favourite colour of the doctor is",
        "What is the favourite colour of the doctor?",
        "black green orange pink red silver white yellow",
    ),
    (
        "The dog of the teacher is called",
        "What is the dog of the teacher called?",
        "Biscuit Daisy Ginger Oscar Pepper Rocky Shadow Toby",
    ),
    (
        "The sister of the baker plays the",
        "What does the sister of the baker play?",
        "drums flute guitar harp organ piano trumpet violin",
    ),
    (
        "The festival of the village is held in",
        "When is the festival of the village held?",
        "April December February January March November October September",
    ),
    (
        "The favourite fruit of the gardener is the",
        "What is the favourite fruit of the gardener?",
        "apple cherry fig grape lemon mango pear strawberry",
    ),
    (
        "The brother of the farmer works as a",
        "What does the brother of the farmer work as?",
        "barber cook driver lawyer miner nurse pilot tailor",
    ),
)
ANSWERS = (
    "I see.",
    "All right.",
    "Good to know.",
    "Thank you.",
    "That is nice.",
    "Very well.",
    "I understand.",
    "How interesting.",
)
"""Replies of the assistant to a fact and to a passage."""
READ_OUT = "I read this:\n\n"


@dataclass(frozen=True)
class Question:
    """A question after a conversation.

    Attributes:
        ids: the user's turn, and the answer up to its word.
        words: the first tokens of the eight possible words.
        right: index of the word that was told.
    """

    ids: list[int]
    words: list[int]
    right: int


@dataclass(frozen=True)
class Conversation:
    """Turns as tokens: the facts, and the other talk turn by turn."""

    facts: list[int]
    talk: list[list[int]]
    questions: list[Question]

    def talk_of(self, num_tokens: int) -> list[list[int]]:
        """First turns of other talk with so many tokens."""
        before = [0, *accumulate(map(len, self.talk))]
        return [turn for turn, n in zip(self.talk, before, strict=False) if n < num_tokens]

    def stops(self, stages: Iterable[int], cache_size: int) -> list[Stop[Question]]:
        """All questions after each stage, which are ascending cache sizes of other talk."""
        longest = max(len(question.ids) for question in self.questions)
        stops, new, num_turns = list[Stop[Question]](), self.facts, 0
        for stage in stages:
            turns = self.talk_of(stage * cache_size)
            ids = [*new, *chain(*turns[num_turns:])]
            stops.append(Stop(stage, ids, self.questions, longest))
            new, num_turns = [], len(turns)
        return stops


def conversations(settings: ToldSettings, loaded: LoadedModel) -> list[Conversation]:
    """Conversations of the settings, each with other talk for the largest cache.

    Raises:
        UserError: a corpus that is too short, a tokenizer that does not tell the words apart.
    """
    tokenizer, rng = loaded.tokenizer, random.Random(settings.seed)
    pieces = token_pieces(settings.corpus, tokenizer, "test")
    passages = cut_chunks(pieces, settings.passage_len, settings.passage_len)
    num_tokens = max(settings.talk) * max(settings.cache_sizes)
    conversations = []
    for _ in range(settings.num_conversations):
        facts, questions = [], []
        for i, (begin, question, words) in enumerate(FACTS):
            index = rng.randrange(len(words.split()))
            fact = f"{begin} {words.split()[index]}."
            facts += turn_ids(tokenizer, fact, not i) + _answer(tokenizer, ANSWERS[i])
            questions.append(_question(tokenizer, begin, question, words.split(), index))
        talk = list(_talk(tokenizer, passages, num_tokens, rng))
        if sum(map(len, talk)) < num_tokens:
            raise UserError(
                f"corpus {settings.corpus!r} is too short for {settings.num_conversations} times "
                f"{num_tokens} tokens of other talk: name a longer one, or smaller --talk or "
                "--num-conversations"
            )
        conversations.append(Conversation(facts, talk, questions))
    return conversations


def _talk(
    tokenizer: PreTrainedTokenizerBase,
    passages: Iterator[list[int]],
    num_tokens: int,
    rng: random.Random,
) -> Iterator[list[int]]:
    """Turns that read out passages, until they have so many tokens or there are no more."""
    while num_tokens > 0 and (passage := next(passages, None)) is not None:
        turn = turn_ids(tokenizer, READ_OUT + tokenizer.decode(passage), is_first=False)
        turn += _answer(tokenizer, rng.choice(ANSWERS))
        num_tokens -= len(turn)
        yield turn


def _question(
    tokenizer: PreTrainedTokenizerBase, begin: str, question: str, words: list[str], index: int
) -> Question:
    answers = [_answer(tokenizer, f"{begin} {word}.") for word in words]
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*answers, strict=False))
    opening = [ids[0] for ids in alike]
    first = [ids[len(opening)] for ids in answers if len(ids) > len(opening)]
    if len(set(first)) < len(words):
        raise UserError(
            f"this model's tokenizer does not distinguish the possible answers to {question!r}: "
            "use a model of ordinary text"
        )
    return Question(turn_ids(tokenizer, question, is_first=False) + opening, first, index)


def _answer(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return what the assistant says, after a turn."""
    text = text if tokenizer.chat_template else f" {text}"
    return ids_of(text, tokenizer, prefix=False, goes_on=True)


def is_right(method: Method, question: Question) -> dict[str, bool]:
    """Return whether the word that was told is the likeliest of the eight, and of all tokens."""
    logits = method.feed(torch.tensor([question.ids], device=method.model.device))[0].float()
    check_losses(-logits.log_softmax(-1)[question.words], method, most=math.inf)
    best, of_all = int(logits[question.words].argmax()), int(logits.argmax())
    return {"accuracy": best == question.right, "exact": of_all == question.words[question.right]}
