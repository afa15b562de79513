"""Conversations through one stream, turn after turn, as StreamingLLM streams MT-Bench (Xiao et al.
2024): is the tenth answer still language?

What is measured is fluency, not whether an answer is right: a stream that has lost its positions
writes word salad whatever it was asked.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import LogitsProcessorList, TopKLogitsWarper

from kvalign.commands.eval_chat import ChatSettings
from kvalign.data_gen.prompts import conversations
from kvalign.eval.document import document
from kvalign.eval.fluency import judge
from kvalign.eval.grid import check_names, make_grid, sizes_of
from kvalign.eval.words import load_words
from kvalign.generation import stream_tokens
from kvalign.methods import Method
from kvalign.models import LoadedModel, load_model
from kvalign.turns import turn_text


def evaluate(settings: ChatSettings) -> dict[str, Any]:
    """Feed the same turns to every method's one stream, and measure its answers.

    Returns:
        A document with `turns` (what the user said), `word_list` (name, num_words) and a row for
        each answer: method, aligner, cache_size, num_sinks, num_evicted, answer (index), num_fed
        (tokens of the stream before it), the measures of `kvalign.eval.fluency.judge`, and text.

    Raises:
        ValueError, FileNotFoundError: wrong settings, said before any work.
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
            bar.set_description(f"{method.title} C={method.cache_size}")
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
    device = loaded.model.device
    end = loaded.model.generation_config.eos_token_id
    ends = [] if end is None else torch.as_tensor(end).reshape(-1).tolist()
    generator = torch.Generator(device).manual_seed(settings.seed)
    num_fed, unfed = 0, list[int]()
    for number, turn in enumerate(talk):
        text = turn_text(loaded.tokenizer, turn, is_first=number == 0)
        prompt_ids = loaded.tokenizer(text, add_special_tokens=number == 0, verbose=False)[
            "input_ids"
        ]
        tokens = stream_tokens(
            method,
            torch.tensor([unfed + prompt_ids], device=device),
            processors=LogitsProcessorList([TopKLogitsWarper(settings.top_k)]),
            do_sample=settings.top_k > 1,
            eos_token_ids=ends,
            generator=generator,
            reset=number == 0,
        )
        token_ids = [int(token) for token in islice(tokens, settings.max_new_tokens)]
        num_fed += len(unfed) + len(prompt_ids)
        yield _Answer(prompt_ids, token_ids, num_fed)
        # The turn after it closes the answer by itself; its last token has not been fed.
        unfed = [token for token in token_ids[-1:] if token not in ends]
        num_fed += len(token_ids) - 1
