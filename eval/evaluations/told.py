"""Told: a conversation states eight facts in its first turns, and asks for them after other talk.

    user: The dog of the teacher is called Biscuit.     assistant: I see.
    ...                                                 other talk: passages of a text
    user: What is the dog of the teacher called?        assistant: The dog of the teacher is called

All turns are given, those of the assistant too. An answer is right if, among the eight possible
words, the one that was told is the most likely. So a small model that writes badly still shows what
it can read.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import TYPE_CHECKING

from kvalign.eval.protocol import (
    METHODS_AND_DENSE,
    DrawnSettings,
    Evaluation,
    corpus_option,
    seed_option,
)
from kvalign.eval.protocol.data import Column, Document, Drawing, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ROWS, MOST_SIZE, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvalign.eval.protocol.questions import Stop
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ToldSettings(DrawnSettings):
    """State eight facts at the beginning of a conversation, and ask for them after other talk: what
    does a stream still know? For models that answer (`--model smollm2-135m-instruct`).

    Example:
        kvalign eval told --cache-sizes 32 --talk 1,4 --num-conversations 1
    """

    methods: tuple[str, ...] = METHODS_AND_DENSE
    corpus: str = corpus_option("text that the other talk quotes")
    talk: tuple[int, ...] = option(
        (4, 16, 64),
        help="tokens of other talk before the questions, in cache sizes, a row each",
        at_least=0,
        at_most=MOST_SIZE,
    )
    passage_len: int = option(
        400,
        help="tokens of the corpus in a turn of other talk; more turns are harder",
        at_least=1,
        at_most=MOST_SIZE,
    )
    num_conversations: int = option(
        4, help="conversations of eight facts each", at_least=1, at_most=MOST_ROWS
    )
    seed: int = seed_option("the facts, the same for each method")


@measures(ToldSettings)
def told(settings: ToldSettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Let every method read the same conversations, and count right answers.

    Returns:
        A document whose rows have the sizes, `COLUMNS`, the ends of 95 % intervals (NAME_low,
        NAME_high) and what `rows_of` says of questions.

    Raises:
        UserError: a corpus that is too short, a tokenizer that does not tell the answers apart.
    """
    from kvalign.eval.protocol.questions import ask_all

    progress.phase(f"reading {settings.corpus}")
    talks, stages = conversations(settings, loaded), sorted(set(settings.talk))

    return ask_all(
        methods, lambda size: [talk.stops(stages, size) for talk in talks], "rounds of questions"
    )


_FACTS = """
The ship in the harbour is called | What is the ship in the harbour called?
    Aurora Falcon Marigold Neptune Phoenix Seagull Titan Victory
The captain of the ship was born in | Where was the captain of the ship born?
    Athens Cairo Dublin Lisbon Moscow Naples Toronto Vienna
The favourite colour of the doctor is | What is the favourite colour of the doctor?
    black green orange pink red silver white yellow
The dog of the teacher is called | What is the dog of the teacher called?
    Biscuit Daisy Ginger Oscar Pepper Rocky Shadow Toby
The sister of the baker plays the | What does the sister of the baker play?
    drums flute guitar harp organ piano trumpet violin
The festival of the village is held in | When is the festival of the village held?
    April December February January March November October September
The favourite fruit of the gardener is the | What is the favourite fruit of the gardener?
    apple cherry fig grape lemon mango pear strawberry
The brother of the farmer works as a | What does the brother of the farmer work as?
    barber cook driver lawyer miner nurse pilot tailor
"""
FACTS: list[tuple[str, str, str]] = re.findall(r"(.+) \| (.+)\n +(.+)", _FACTS)
"""How a fact begins, its question, and the words that may end it, which begin differently."""
ANSWERS = [
    *("I see.", "All right.", "Good to know.", "Thank you."),
    *("That is nice.", "Very well.", "I understand.", "How interesting."),
]
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
class TokenTurns:
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
        from kvalign.eval.protocol.questions import Stop

        longest = max(len(question.ids) for question in self.questions)
        stops, new, num_turns = list[Stop[Question]](), self.facts, 0
        for stage in stages:
            turns = self.talk_of(stage * cache_size)
            ids = [*new, *chain(*turns[num_turns:])]
            stops.append(Stop({"talk": stage}, [ids], self.questions, is_right, longest))
            new, num_turns = [], len(turns)
        return stops


def conversations(settings: ToldSettings, loaded: LoadedModel) -> list[TokenTurns]:
    """Conversations of the settings, each with other talk for the largest cache.

    Raises:
        UserError: a corpus that is too short, a tokenizer that does not tell the words apart.
    """
    from kvalign.data_gen.corpora import cut_chunks, token_pieces
    from kvalign.streaming.turns import Talk

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
            facts += Talk(tokenizer).turn_ids(fact, not i) + _answer(tokenizer, ANSWERS[i])
            questions.append(_question(tokenizer, begin, question, words.split(), index))
        talk = list(_talk(tokenizer, passages, num_tokens, rng))
        if sum(map(len, talk)) < num_tokens:
            raise UserError(
                f"corpus {settings.corpus!r} is too short for {settings.num_conversations} times "
                f"{num_tokens} tokens of other talk: name a longer one, or smaller --talk or "
                "--num-conversations"
            )
        conversations.append(TokenTurns(facts, talk, questions))
    return conversations


def _talk(
    tokenizer: PreTrainedTokenizerBase,
    passages: Iterator[list[int]],
    num_tokens: int,
    rng: random.Random,
) -> Iterator[list[int]]:
    """Turns that read out passages, until they have so many tokens or there are no more."""
    from kvalign.streaming.turns import Talk

    while num_tokens > 0 and (passage := next(passages, None)) is not None:
        turn = Talk(tokenizer).turn_ids(READ_OUT + tokenizer.decode(passage), is_first=False)
        turn += _answer(tokenizer, rng.choice(ANSWERS))
        num_tokens -= len(turn)
        yield turn


def _question(
    tokenizer: PreTrainedTokenizerBase, begin: str, question: str, words: list[str], index: int
) -> Question:
    from kvalign.streaming.turns import Talk

    answers = [_answer(tokenizer, f"{begin} {word}.") for word in words]
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*answers, strict=False))
    opening = [ids[0] for ids in alike]
    first = [ids[len(opening)] for ids in answers if len(ids) > len(opening)]
    if len(set(first)) < len(words):
        raise UserError(
            f"this model's tokenizer does not distinguish the possible answers to {question!r}: "
            "use a model of ordinary text"
        )
    return Question(Talk(tokenizer).turn_ids(question, is_first=False) + opening, first, index)


def _answer(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return what the assistant says, after a turn."""
    from kvalign.models.input_ids import ids_of

    text = text if tokenizer.chat_template else f" {text}"
    return ids_of(text, tokenizer, prefix=False, goes_on=True)


def is_right(method: Method, question: Question) -> dict[str, bool]:
    """Return whether the word that was told is the likeliest of the eight, and of all tokens."""
    import torch

    from kvalign.streaming.scoring import check_losses

    logits = method.feed(torch.tensor([question.ids], device=method.model.device))[0].float()
    check_losses(-logits.log_softmax(-1)[question.words], method, most=math.inf)
    best, of_all = int(logits[question.words].argmax()), int(logits.argmax())
    return {"accuracy": best == question.right, "exact": of_all == question.words[question.right]}


CHANCE = "0.125 by chance"
COLUMNS = {
    "talk": Column("other talk", about="tokens, in cache sizes"),
    "accuracy": share_column(
        "accuracy", "right of eight", f"answers whose word is the likeliest of eight, {CHANCE}"
    ),
    "exact": share_column(
        "exact", "right of all", "answers whose word is the likeliest of all tokens"
    ),
    "num_tokens": Column("tokens", about="mean length of the conversation before the questions"),
}


class Told(Evaluation):
    settings = ToldSettings
    run = staticmethod(told)
    heading = "Told in conversation"
    about = (
        "Eight facts are stated in the first turns of a conversation and asked for after other "
        "talk, on a copy of the stream. All turns are given. An answer is right if the word "
        f"that was told is the likeliest of the eight possible ones: {CHANCE}."
    )
    over = "talk"
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing:
        """Right answers against other talk, in a panel for each cache size."""
        from kvalign.eval.drawing import draw, panels_by

        title, rows = self.title(document), document["rows"]
        names = ("talk", "accuracy", "accuracy_high", "accuracy_low")
        panels = panels_by("cache_size", rows, f"{title}, C = ", *names)
        x, y = "other talk, cache sizes", "right answers (by chance 1 in 8)"
        figure = draw(panels, x=x, y=y, doubling_x=all(row["talk"] for row in rows))
        return figure, f"Right answers against other talk, 95 %: {title}"


EVALUATION = Told()
