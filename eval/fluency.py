"""How a passage reads: the paper's rule for chunks of words, and what that rule does not see.

The paper (KV-Align 2024) cuts a passage into chunks of 10 NLTK tokens and calls a chunk readable
if at least half of them are dictionary words or end a sentence. Text that repeats one word for
ever passes; so repetition is counted beside it (distinct-n: Li et al. 2016; rep-4: Welleck et al.
2020), and the perplexity of the passage under the model itself with nothing evicted.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from nltk.stem.snowball import SnowballStemmer
from nltk.tokenize import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktSentenceTokenizer
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.models import LoadedModel

CHUNK_LEN = 10  # NLTK tokens
TERMINAL = frozenset(".!?")
MAX_PHRASE_LEN = 4  # tokens of a phrase that may run
MAX_SPAN = 1024  # model tokens of context when a passage is scored

_STEM = SnowballStemmer("english").stem


@dataclass(frozen=True)
class Chunk:
    """A piece of a passage: text[start:end], and how many of its tokens the rule knows."""

    start: int
    end: int
    num_tokens: int
    num_known: int

    @property
    def is_readable(self) -> bool:
        return 2 * self.num_known >= self.num_tokens


def token_spans(text: str) -> list[tuple[int, int]]:
    """Where NLTK's word tokens lie. Punkt splits sentences without its data of abbreviations."""
    return [
        (start + left, start + right)
        for start, end in PunktSentenceTokenizer().span_tokenize(text)
        for left, right in NLTKWordTokenizer().span_tokenize(text[start:end])
    ]


def is_known(token: str, words: frozenset[str]) -> bool:
    """Whether a token, lower-cased, or its Snowball stem is a word, or it ends a sentence."""
    token = token.lower()
    return token in TERMINAL or token in words or _STEM(token) in words


def chunks(text: str, words: frozenset[str]) -> list[Chunk]:
    """A passage in chunks of 10 tokens, the last one shorter; none for a text without a token."""
    spans = [(*span, is_known(text[slice(*span)], words)) for span in token_spans(text)]
    parts = [spans[i : i + CHUNK_LEN] for i in range(0, len(spans), CHUNK_LEN)]
    return [
        Chunk(part[0][0], part[-1][1], len(part), sum(known for *_, known in part))
        for part in parts
    ]


def distinct(tokens: Sequence[str], n: int) -> float:
    """Distinct n-grams by all n-grams: 1 where nothing repeats, and for a text without any."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_run(tokens: Sequence[str]) -> int:
    """Tokens of the longest stretch that only repeats a phrase of at most 4 tokens, said at least
    twice; 0: no phrase follows itself.
    """
    longest = 0
    for period in range(1, MAX_PHRASE_LEN + 1):
        same = 0
        for i in range(period, len(tokens)):
            same = same + 1 if tokens[i] == tokens[i - period] else 0
            if same >= period:
                longest = max(longest, same + period)
    return longest


def measures(text: str, words: frozenset[str]) -> dict[str, float | int]:
    """num_chunks, readable (share of chunks), distinct_1, distinct_2, repetition (share of 4-grams
    that occurred before) and longest_run of a passage.
    """
    pieces = chunks(text, words)
    tokens = [text[start:end].lower() for start, end in token_spans(text)]
    readable = sum(chunk.is_readable for chunk in pieces)
    return {
        "num_chunks": len(pieces),
        "readable": readable / len(pieces) if pieces else 0.0,
        "distinct_1": distinct(tokens, 1),
        "distinct_2": distinct(tokens, 2),
        "repetition": 1 - distinct(tokens, 4),
        "longest_run": longest_run(tokens),
    }


def judge(
    loaded: LoadedModel, prompt_ids: list[int], token_ids: list[int], words: frozenset[str]
) -> dict[str, Any]:
    """All that is measured of what a model wrote after a prompt.

    Returns:
        num_tokens, the measures of `measures`, dense_perplexity (of the passage under the model
        with nothing evicted; low where a text repeats itself, too), text, and chunks: lists of
        start and end in the text, tokens, tokens known, and whether the chunk is readable.
    """
    text = loaded.tokenizer.decode(token_ids, skip_special_tokens=True)
    device, span = loaded.model.device, min(loaded.spec.context_len or MAX_SPAN, MAX_SPAN)
    prompt, passage = (torch.tensor(ids, device=device) for ids in (prompt_ids, token_ids))
    return {
        "num_tokens": len(token_ids),
        **measures(text, words),
        "dense_perplexity": dense_perplexity(loaded.model, prompt, passage, span),
        "text": text,
        "chunks": [[*astuple(chunk), chunk.is_readable] for chunk in chunks(text, words)],
    }


@torch.no_grad()
def dense_perplexity(model: PreTrainedModel, prompt: Tensor, passage: Tensor, span: int) -> float:
    """Perplexity of a passage under the model with nothing stale and much context.

    Windows of `span` tokens, half of each new: a token sees at least span / 2 before it, or all.

    Args:
        prompt: [N] int64, not empty; context of the passage, not scored.
        passage: [M] int64, M >= 1.
        span: tokens of a window, at most the model's context length, at least 2.
    """
    ids = torch.cat([prompt, passage])
    total, scored = 0.0, len(prompt)
    while scored < len(ids):
        end = min(len(ids), max(scored + span // 2, span))
        start = max(0, end - span)
        num_new = end - scored
        output = model(input_ids=ids[None, start:end], use_cache=False, logits_to_keep=num_new + 1)
        logits = output.logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[scored:end], reduction="sum").item()
        scored = end
    return math.exp(total / len(passage))
