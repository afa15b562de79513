"""Shared parts of the evaluations of written text: settings, how texts are judged, and how that is
shown. The modules have the rules, the words and the chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvalign.eval.judging.words import RULES, Rule, load_words
from kvalign.eval.protocol import Column, Document, Documents, Evaluation, Row, Section
from kvalign.eval.protocol.settings import ComparisonSettings, seed_option
from kvalign.eval.protocol.tables import means
from kvalign.foundation.settings import flag, option

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.sampling import Sampling

log = logging.getLogger(__name__)

MAX_SPAN = 1024  # model tokens of context when a passage is scored


@dataclass(frozen=True, kw_only=True)
class WritingSettings(ComparisonSettings):
    """Base of the settings of evaluations of written text."""

    prompts: str = option(
        "own", help="prompts to continue: own, mt-bench, or a .jsonl file of turns"
    )
    max_new_tokens: int = option(600, help="tokens to generate for each prompt", at_least=1)
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    rule: str = option(
        "paper",
        help="rule for readable: the paper's text, or its authors' code (a comma counts, a last "
        "chunk of fewer than 10 tokens does not)",
        choices=tuple(RULES),
    )
    seed: int = seed_option("the draws, the same for each method")

    def first(self, texts: Sequence[str], name: str) -> list[str]:
        """First prompts, as many as the setting says, with a warning if there are fewer."""
        number = getattr(self, name)
        if len(texts) < number:
            log.warning(
                "%s %d: %s has %d, all are taken", flag(name), number, self.prompts, len(texts)
            )
        return list(texts[:number])

    def sampling(self, **more: Any) -> Sampling:
        from kvalign.streaming.sampling import Sampling

        same = {name: getattr(self, name) for name in ("max_new_tokens", "top_k", "seed")}
        return Sampling(**same | more)


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
    "longest_run": Column(
        "longest run", 1, "lower", "longest run of tokens that repeats a short phrase"
    ),
    "dense_perplexity": Column("dense perplexity", 1, about="under the model, nothing evicted"),
}
MEAN_COLUMNS = {"num_passages": Column("passages"), **MEASURES}
COUNTS = ("num_readable", "num_chunks")


class JudgedText(Evaluation):
    """Base of evaluations of written text; tables have means over rows that share `by`."""

    by: ClassVar[tuple[str, ...]] = ()

    def title(self, document: Document) -> str:
        model = document["settings"]["model"]
        return f"{model or 'texts'}, rule: {document['rule'].get('name')}"

    def about_one(self, document: Document) -> str:
        """Return the description of one document, in words."""
        return self.about

    def rows(self, document: Document) -> list[Row]:
        return means(document["rows"], MEASURES, self.by, COUNTS)

    def sections(self, documents: Documents) -> list[Section]:
        """Notes of any evaluation, with the rules and the word lists of the documents."""
        lines = [self.about_one(document) for document in documents.values()]
        for document in documents.values():
            rule, words = document["rule"], document["word_list"]
            lines.append(
                f"Rule {rule.get('name')}: {rule.get('about')} Word list: {words.get('name')}, "
                f"{words.get('num_words')} words, SHA-256 {words.get('sha256')}."
            )
        about = " ".join(dict.fromkeys(lines))
        return [Section.of(documents, self.heading, about, self.figure, self.tables)]


def judge(
    loaded: LoadedModel, prompt_ids: list[int], token_ids: list[int], rule: Rule
) -> dict[str, Any]:
    """Return the result of `kvalign.eval.judging.chunks.judged` with num_tokens and
    dense_perplexity, which is also low for repetitive text.
    """
    import torch

    from kvalign.eval.judging.chunks import judged

    text = loaded.tokenizer.decode(token_ids, skip_special_tokens=True)
    device, span = loaded.model.device, min(loaded.spec.context_len or MAX_SPAN, MAX_SPAN)
    prompt, passage = (torch.tensor(ids, device=device) for ids in (prompt_ids, token_ids))
    return {
        "num_tokens": len(token_ids),
        "dense_perplexity": dense_perplexity(loaded.model, prompt, passage, span),
        **judged(text, load_words().words, rule),
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
