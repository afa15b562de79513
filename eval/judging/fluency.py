"""How a passage that a model wrote reads: its chunks and repetition (`chunks.py`), and its
perplexity under the model itself with nothing evicted.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.eval.judging.chunks import judged
from kvalign.eval.judging.rules import Rule
from kvalign.models.loading import LoadedModel
from kvalign.streaming.health import perplexity_of

MAX_SPAN = 1024  # model tokens of context when a passage is scored


def judge(
    loaded: LoadedModel,
    prompt_ids: list[int],
    token_ids: list[int],
    words: frozenset[str],
    rule: Rule,
) -> dict[str, Any]:
    """All that is measured of what a model wrote after a prompt.

    Returns:
        num_tokens, dense_perplexity (of the passage under the model with nothing evicted; low
        where a text repeats itself, too), and what `kvalign.eval.judging.chunks.judged` returns.
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
    return perplexity_of(total / len(passage))
