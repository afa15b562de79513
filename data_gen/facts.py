"""Stream that tests memory: facts, questions about them, and their answers.

A fact gives a key a new value, a question asks for the last value of a key, and the answer follows
at once: `k7=3` ... `k7?` `3`. Keys get new values again and again; the last one counts. Each fact,
question and answer is one token of a separate vocabulary. After recall tasks of Arora et al. 2023
(Zoology), made endless.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"
NUM_KEYS, NUM_VALUES = 64, 8
FACT_SHARE = 0.6  # of the places that are not an answer
MAX_AGE = 256  # facts that are asked for are at most about as old, in tokens
REST = 64  # tokens of `max_age` for each key that rests, so that questions keep up with them

QUESTION = NUM_KEYS * NUM_VALUES  # the first question's id; facts are 0 to here
ANSWER = QUESTION + NUM_KEYS  # the first answer's id


class FactStreams:
    """Endless streams side by side; each `take` continues where the last one ended.

    Ages of asked facts are uniform, up to about `max_age` tokens: an age is drawn, then the key
    whose last fact is nearest to it. With `ask_oldest` every second stream draws only from the last
    eighth: in a short stream few facts become so old before their key gets a new value.

    With `resting` some keys rest, at most half of them, so that there are facts of all ages. Such a
    key gets a value, is asked for once, at an age drawn on a log scale, and then gets another
    value. Other keys are as without, asked for up to `MAX_AGE`.
    """

    def __init__(
        self,
        seed: int | tuple[int, ...],
        num_rows: int = 1,
        max_age: int = MAX_AGE,
        ask_oldest: bool = False,
        resting: bool = False,
    ):
        self.rng, self.max_age, self.now = np.random.default_rng(seed), max_age, 0
        oldest = max_age - max_age // 8
        self.min_age = np.where(np.arange(num_rows) % 2, oldest, 1) if ask_oldest else 1
        self.rows = np.arange(num_rows)
        shape = (num_rows, NUM_KEYS)
        self.value = self.rng.integers(NUM_VALUES, size=shape)
        # When each key was given its value, as in a stream that began long ago.
        self.fact_times = -self.rng.geometric(FACT_SHARE / (2 - FACT_SHARE) / NUM_KEYS, size=shape)
        self.last_keys = np.full(num_rows, -1)  # the key of the question before, -1 for none
        # When each resting key is asked for; never, while it waits for a value.
        num_resting = min(max(1, max_age // REST), NUM_KEYS // 2) if resting else 0
        self.due = np.full((num_rows, num_resting), np.inf)
        self.num_others = NUM_KEYS - num_resting
        self.take(8)

    def take(self, num_tokens: int) -> np.ndarray:
        """The next tokens of every stream: [B, num_tokens] int64."""
        shape = (num_tokens, len(self.rows))
        is_fact = self.rng.random(shape) < FACT_SHARE
        facts = self.rng.integers(self.num_others * NUM_VALUES, size=shape)
        resting = self.due.shape[1] > 0
        max_age = min(self.max_age, MAX_AGE) if resting else self.max_age
        ages = self.rng.integers(self.min_age, max_age, size=shape, endpoint=True)
        ids = np.empty(shape, np.int64)
        for i in range(num_tokens):
            answers = self.last_keys >= 0
            is_new = is_fact[i] & ~answers
            since = self.now - self.fact_times[:, : self.num_others]
            questions = np.abs(since - ages[i][:, None]).argmin(1)
            if resting:
                self._rest(is_new, ~is_new & ~answers, facts[i], questions)
            ids[i] = np.where(is_new, facts[i], QUESTION + questions)
            ids[i] = np.where(answers, ANSWER + self.value[self.rows, self.last_keys], ids[i])
            rows, (key, value) = self.rows[is_new], np.divmod(facts[i][is_new], NUM_VALUES)
            self.value[rows, key], self.fact_times[rows, key] = value, self.now
            self.last_keys = np.where(answers | is_new, -1, questions)
            self.now += 1
        return ids.T.copy()

    def _rest(
        self, tells: np.ndarray, asks: np.ndarray, facts: np.ndarray, questions: np.ndarray
    ) -> None:
        """Put resting keys in place of a fact, or of the key that is asked for, where it is time:
        [B] each.
        """
        waits = np.isinf(self.due)
        rows = self.rows[tells & waits.any(1)]
        keys = waits[rows].argmax(1)
        values = self.rng.integers(NUM_VALUES, size=len(rows))
        facts[rows] = (self.num_others + keys) * NUM_VALUES + values
        self.due[rows, keys] = self.now + np.exp(
            self.rng.uniform(0, np.log(self.max_age), size=len(rows))
        )
        rows = self.rows[asks & (self.due.min(1) <= self.now)]
        keys = self.due[rows].argmin(1)
        questions[rows] = self.num_others + keys
        self.due[rows, keys] = np.inf


def ages(ids: Sequence[int]) -> list[int]:
    """Return for each answer in a stream the number of tokens from its fact to its question; 0 for
    any other token, and if the fact is not among these or a later answer has repeated it.
    """
    times: dict[int, int] = {}
    distances = [0] * len(ids)
    for i, token in enumerate(ids):
        if token < QUESTION:
            times[token // NUM_VALUES] = i
        elif token >= ANSWER and i and (at := times.pop(ids[i - 1] - QUESTION, None)) is not None:
            distances[i] = i - 1 - at
    return distances


NUM_QUARTERS = 4
PIECE_LEN = 4096  # tokens made at once


def part_of(age: int, cache_size: int, farthest: int = 0) -> int:
    """Number of the range of a fact's distance: the quarter of the cache, and what is beyond; with
    `farthest`, beyond it those up to 2 C, 4 C, 8 C, ...
    """
    quarter = (NUM_QUARTERS * age - 1) // cache_size
    if quarter < NUM_QUARTERS:
        return quarter
    times = -(-age // cache_size)  # above C: 2, up to 2 C; 3 and 4, up to 4 C; ...
    return NUM_QUARTERS + ((times - 1).bit_length() - 1 if farthest else 0)


def asked_streams(
    cache_size: int, *, num_questions: int, farthest: int, num_streams: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Streams long enough for so many questions in each range of distance, up to 1.5 or `farthest`
    cache sizes; more are not counted.

    Returns:
        ids [B, N] int64; ages [B, N - C - 1] int64: of each label that counts the distance of its
        fact, else 0.
    """
    first, max_age = cache_size + 1, cache_size * farthest or math.ceil(1.5 * cache_size)
    streams = FactStreams(seed, num_streams, max_age, resting=bool(farthest))
    ids = np.empty((num_streams, 0), np.int64)
    while True:
        piece_len = max(-(-PIECE_LEN // num_streams), ids.shape[1] // 4)
        ids = np.concatenate([ids, streams.take(piece_len)], axis=1)
        distances = np.array([ages(row) for row in ids.tolist()])[:, first:]
        distances[distances > max_age] = 0
        counts = np.zeros(part_of(max_age, cache_size, farthest) + 1, np.int64)
        for label in zip(*distances.T.nonzero()[::-1], strict=True):  # in the order of time
            part = part_of(int(distances[label]), cache_size, farthest)
            counts[part] += 1
            if counts[part] > num_questions:
                distances[label] = 0
        if counts.min() >= num_questions:
            break
    end = int(distances.nonzero()[1].max()) + 1
    return ids[:, : first + end], distances[:, :end]


WORDS = (
    *(f"k{key}={value}" for key in range(NUM_KEYS) for value in range(NUM_VALUES)),
    *(f"k{key}?" for key in range(NUM_KEYS)),
    *map(str, range(NUM_VALUES)),
    END,
)
"""The vocabulary: a fact's id is key * NUM_VALUES + value."""


def are_words_of(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a tokenizer has this vocabulary, as that of a model trained on facts."""
    return tokenizer.convert_tokens_to_ids(list(WORDS)) == [*range(len(WORDS))]


def recall_tokenizer(context_len: int) -> "PreTrainedTokenizerFast":
    """Tokenizer of words separated by white space, one token each; any unknown word is END."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=END,
        eos_token=END,
        unk_token=END,
        model_max_length=context_len,
    )
