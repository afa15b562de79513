"""Judgement of a written text: its measures. The modules have the rules, words and chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvalign.eval.judging.words import Rule, load_words
from kvalign.eval.protocol import Column

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvalign.models.loading import LoadedModel

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
    "longest_run": Column(
        "longest run", 1, "lower", "longest run of tokens that repeats a short phrase"
    ),
    "dense_perplexity": Column("dense perplexity", 1, about="under the model, nothing evicted"),
}


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
