"""Readability of a passage that a model wrote: `chunks.py`, and its perplexity under the model."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.eval.judging.chunks import judged
from kvalign.eval.judging.words import Rule
from kvalign.models.loading import LoadedModel
from kvalign.streaming.scoring import perplexity_of

MAX_SPAN = 1024  # model tokens of context when a passage is scored


def judge(
    loaded: LoadedModel,
    prompt_ids: list[int],
    token_ids: list[int],
    words: frozenset[str],
    rule: Rule,
) -> dict[str, Any]:
    """Return the result of `kvalign.eval.judging.chunks.judged` with num_tokens and
    dense_perplexity, which is also low for repetitive text.
    """
    text = loaded.tokenizer.decode(token_ids, skip_special_tokens=True)
    device, span = loaded.model.device, min(loaded.spec.context_len or MAX_SPAN, MAX_SPAN)
    prompt, passage = (torch.tensor(ids, device=device) for ids in (prompt_ids, token_ids))
    return {
        "num_tokens": len(token_ids),
        "dense_perplexity": dense_perplexity(loaded.model, prompt, passage, span),
        **judged(text, words, rule),
    }


@torch.no_grad()
def dense_perplexity(model: PreTrainedModel, prompt: Tensor, passage: Tensor, span: int) -> float:
    """Perplexity of a passage [M] after a prompt [N], ids and not empty, without evictions: in
    windows of `span` tokens that advance by half, so each token sees span / 2 before it, or all.
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
    return perplexity_of(total / len(passage))
