"""Conversations through one stream, turn after turn, as StreamingLLM streams MT-Bench (Xiao et al.
2024): is the tenth answer still language?

What is measured is fluency, not whether an answer is right: a stream that has lost its positions
writes word salad whatever it was asked.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from kvalign.data_gen.prompts import conversations
from kvalign.eval.document import document
from kvalign.eval.fluency import judge
from kvalign.eval.grid import check_names, make_grid, sizes_of
from kvalign.eval.settings import ChatSettings
from kvalign.eval.words import load_words
from kvalign.methods.base import Method
from kvalign.models import LoadedModel, load_model
from kvalign.text_stream import Sampling, TextStream
from kvalign.turns import turn_ids


def evaluate(settings: ChatSettings) -> dict[str, Any]:
    """Feed the same turns to every method's one stream, and measure its answers.

    Returns:
        A document with `turns` (what the user said), `word_list` (name, num_words) and a row for
        each answer: method, aligner, cache_size, num_sinks, num_evicted, answer (index), num_fed
        (tokens of the stream before it), the measures of `kvalign.eval.fluency.judge`, and text.

    Raises:
        UserError: wrong settings, said before any work.
    """
    started = time.perf_counter()
    check_names(settings)
    talk = [turn for turns in conversations(settings.prompts) for turn in turns]
    talk = talk[: settings.num_turns]
    words = load_words(settings.words, settings.nltk_data)
    loaded = load_model(settings.model, settings.device, settings.dtype)
    methods = make_grid(settings, loaded.model)
    rows = []
    with tqdm(total=len(methods) * len(talk), unit="answer") as bar:
        for method in methods:
            bar.set_description(f"{method.title} C={method.sizes.cache_size}")
            for number, answer in enumerate(_answers(loaded, method, talk, settings)):
                judged = judge(loaded, answer.prompt_ids, answer.token_ids, words.words)
                place = {"answer": number, "num_fed": answer.num_fed}
                rows.append(sizes_of(method) | place | judged)
                bar.update()
    return document(
        "eval chat",
        settings,
        rows,
        started=started,
        turns=talk,
        word_list={"name": words.name, "num_words": len(words.words)},
    )


@dataclass(frozen=True)
class _Answer:
    prompt_ids: list[int]  # of the turn
    token_ids: list[int]
    num_fed: int


def _answers(
    loaded: LoadedModel, method: Method, talk: list[str], settings: ChatSettings
) -> Iterator[_Answer]:
    """The answers to all turns, in one stream."""
    sampling = Sampling(
        max_new_tokens=settings.max_new_tokens,
        top_k=settings.top_k,
        stop_at_end=True,
        seed=settings.seed,
    )
    stream = TextStream(loaded.tokenizer, method, sampling)
    for number, turn in enumerate(talk):
        prompt_ids = turn_ids(loaded.tokenizer, turn, is_first=number == 0)
        stream.feed(prompt_ids)
        num_fed = len(stream.ids)
        for _ in stream:
            pass
        yield _Answer(prompt_ids, stream.token_ids, num_fed)
