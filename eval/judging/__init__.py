"""Judgement of a written text: its measures, the rules for what is readable, and English words: the
`words` corpus of NLTK, the same on every machine. `chunks` applies them.

The corpus is Webster's Second International (1934; public domain) with C. K. Ogden's 850 words of
Basic English, capitals included. It has no plurals and few inflected forms. It is made from the
package english-words and the hundred words in which the two differ, words.txt.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvalign.eval.protocol.data import Column
from kvalign.foundation.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MAX_SPAN = 1024  # model tokens of context when a passage is scored

MEASURES = {
    "readable": Column(
        "readable",
        3,
        "higher",
        "share of chunks, half of whose tokens are words; 95 %, with enough runs",
        ends=("readable_low", "readable_high"),
    ),
    "distinct_1": Column("distinct-1", 3, about="different words relative to all words"),
    "distinct_2": Column("distinct-2", 3, about="different pairs of words relative to all pairs"),
    "repetition": Column(
        "repetition", 3, "lower", "share of 4-grams of words that occurred before"
    ),
    "dense_perplexity": Column("dense perplexity", 1, about="under the model, nothing evicted"),
}


def dense_perplexity(model: PreTrainedModel, prompt: Tensor, passage: Tensor, span: int) -> float:
    """Perplexity of a passage [M] after a prompt [N], ids and not empty, without evictions: in
    windows of `span` tokens that advance by half, so each token sees span / 2 before it, or all.
    """
    import torch

    from kvalign.streaming.scoring import perplexity_of

    ids = torch.cat([prompt, passage])
    total, scored = 0.0, len(prompt)
    while scored < len(ids):
        end = min(len(ids), max(scored + span // 2, span))
        start = max(0, end - span)
        num_new = end - scored
        how: dict[str, Any] = dict(use_cache=False, logits_to_keep=num_new + 1)
        with torch.no_grad():
            logits = model(input_ids=ids[None, start:end], **how).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[scored:end], reduction="sum").item()
        scored = end
    return perplexity_of(total / len(passage))


SHA256 = "631329862b26a1b4b11c06245c00be415664637e943f98fa81d93406c6de4c3b"  # of its sorted lines
WORD_LIST = {"name": "words corpus of NLTK", "num_words": 235_892, "sha256": SHA256}
"""What a document says of the word list."""
_PACKAGE = "english-words==2.0.2"


def data_of(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


@functools.cache
def load_words() -> frozenset[str]:
    """Word list; UserError if the installed english-words has other words."""
    from english_words import get_english_words_set

    changes = data_of("words.txt").split()
    added, removed = ({word[1:] for word in changes if word[0] == sign} for sign in "+-")
    words = (get_english_words_set(["web2"]) - removed) | added
    digest = hashlib.sha256("".join(f"{word}\n" for word in sorted(words)).encode()).hexdigest()
    if digest != SHA256:
        raise UserError(
            f"the word list is not the pinned one (SHA-256 {digest[:12]}..., needed "
            f"{SHA256[:12]}...): pip install {_PACKAGE}"
        )
    return frozenset(words)


@dataclass(frozen=True)
class Rule:
    """Rule for tokens that count besides words."""

    name: str
    about: str
    marks: frozenset[str]  # tokens that count as known
    judges_rest: bool  # are the tokens after the last whole chunk judged, as a shorter one?

    @property
    def described(self) -> dict[str, Any]:
        """Form of the rule in a document."""
        return {"name": self.name, "about": self.about}


def readers_text(text: str) -> str:
    """The text that is judged. Models of WikiText write `<unk>` for a rare word, and `@-@` within
    one; NLTK would cut these into non-words. The models of the paper write neither.
    """
    return re.sub(r" @([-.,])@ ", r"\1", re.sub(r" ?<unk>", "", text))


_CHUNK = (
    "The marks <unk> and @-@ of WikiText are taken out. A chunk is 10 tokens of NLTK 3.9. It is "
    "readable if at least half of them are in the word list, lower-cased or by their Snowball "
    "stems, or are among"
)
_PAPER = f"{_CHUNK} “. ! ?” (the paper's text). Fewer than 10 at the end are a chunk, too."
_AUTHORS = (
    f"{_CHUNK} “. , ! ?” (the code of the paper's authors). Fewer than 10 at the end are left out."
)
RULES = {
    "paper": Rule("paper", _PAPER, frozenset(".!?"), judges_rest=True),
    "authors": Rule("authors", _AUTHORS, frozenset(".,!?"), judges_rest=False),
}
