"""Judge of an aligner: streams of held-out text, with its parts and without, show whether it helps.

The error of vectors does not show it. Neither does a stream without sinks on a model that needs
them: there anything helps that turns some entry into a sink. So each set of parts (none, keys,
values, both) streams the same text, with the default sinks of streaming methods and without. To be
used, a set must beat the best of `streaming-llm`, which is the set of none.

All cache sizes have the same labels, and a label's loss is its mean over them: so each label counts
once in an interval. Every other row chooses. The rest, which had no part in the choice, are what
is reported.

For the corpus `recall` only answers count whose fact is still in the cache (`Text.counted`).
"""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.aligners.kinds import TARGETS
from kvalign.eval.protocol.statistics import interval
from kvalign.foundation import progress
from kvalign.methods import make_method
from kvalign.methods.choice import lack_of_aligner
from kvalign.methods.streaming_llm import StreamingLLM
from kvalign.models.prefix_tokens import with_prefix
from kvalign.streaming.health import check_losses
from kvalign.streaming.scoring import score
from kvalign.training.text import Text, val_sizes

ROW_LABELS = 256
NUM_ROWS = 8  # every other one chooses, the rest are reported

Weights = dict[str, Tensor]
Parts = tuple[str, ...]


def usual_sinks(family: str) -> int:
    """Sinks of a model before anything is judged. Without an aligner entries of learned positions
    become stale with any number; elsewhere the default of `streaming-llm` is four.
    """
    return 0 if family == "learned" else StreamingLLM.default_num_sinks


def judge(
    aligner: Aligner,
    untrained: Weights,
    model: PreTrainedModel,
    text: Text,
    kvs: Parts,
) -> dict[str, Any]:
    """Stream validation text with each set of parts and sinks. `aligner` keeps the simplest set
    that does not differ from the best: few parts, then the usual sinks, then a low loss. Sets
    differ if the 95 % interval of the paired difference says so, on every other row.

    Args:
        aligner: trained. `config.num_sinks` are the usual sinks, and the only choice for a network.
        untrained: its weights before training, which change nothing.
        text: its validation part is streamed.
        kvs: the trained parts.

    Returns:
        `parts` and `num_sinks`: the choice; `val_nll`: its loss; `without`: `num_sinks` and
        `val_nll` of the best without an aligner; `discard_half`: that method's loss with the chosen
        sinks; `shipped`: `aligner` and `val_nll` of the model's shipped aligner, None if there is
        none for these caches; `streams`: `parts`, `num_sinks`, `val_nll` and `by_cache` (by cache
        size) of each set; `cache_sizes`, `num_labels`. Losses are in nats per token, of the rows
        that did not choose.

    Raises:
        UserError: only answers of the text count, and there are none.
    """
    progress.phase("judging by streaming")
    rows = excerpts(text, aligner.config.chunk_len - 1)
    usual, every = aligner.config.num_sinks, aligner.config.shifts[0]
    trained = {name: x.clone() for name, x in aligner.state_dict().items()}
    sinks = [n for n in sorted({0, StreamingLLM.default_num_sinks, usual}) if n < min(rows)]
    sets = [parts for n in range(len(kvs) + 1) for parts in combinations(kvs, n)]
    choosing: dict[tuple[Parts, int], Tensor] = {}
    reported: dict[tuple[Parts, int], Tensor] = {}
    for parts in sets:
        use_parts(aligner, trained, untrained, parts)
        name, options = "streaming-llm", {}
        if parts:
            name, options = "kvalign", {"aligner": aligner, "realign_every": every}
        for n in [usual] if parts and aligner.recursive else sinks:
            losses = streamed(model, text, rows, name, num_sinks=n, **options)
            choosing[parts, n], reported[parts, n] = by_label(losses[:, 0::2]), losses[:, 1::2]
    nll = {one: loss.mean().item() for one, loss in choosing.items()}
    best = min(nll, key=lambda one: nll[one])
    simplest = sorted(nll, key=lambda one: (len(one[0]), one[1] != usual, nll[one]))
    choice = next(x for x in simplest if x == best or not _is_better(choosing[best], choosing[x]))
    use_parts(aligner, trained, untrained, choice[0])
    half = streamed(model, text, rows, "discard-half", num_sinks=choice[1])
    plain = min(sinks, key=lambda n: nll[(), n])
    val_nll = {one: by_label(losses).mean().item() for one, losses in reported.items()}
    return {
        "parts": list(choice[0]),
        "num_sinks": choice[1],
        "val_nll": val_nll[choice],
        "without": {"num_sinks": plain, "val_nll": val_nll[(), plain]},
        "discard_half": by_label(half[:, 1::2]).mean().item(),
        "shipped": _shipped(model, text, rows),
        "streams": [
            {
                "parts": list(parts),
                "num_sinks": n,
                "val_nll": val_nll[parts, n],
                "by_cache": losses.flatten(1).nanmean(1).tolist(),
            }
            for (parts, n), losses in reported.items()
        ],
        "cache_sizes": list(rows),
        "num_labels": len(by_label(reported[best])),
    }


def by_label(losses: Tensor) -> Tensor:
    """Losses of labels, [N]: means over the cache sizes of [sizes, rows, labels], which may be nan
    where a label does not count. Losses of one label at several sizes are alike. Side by side they
    would pass as independent, and an interval of them would be too narrow.
    """
    means = losses.flatten(1).nanmean(0)
    return means[~means.isnan()]


def _shipped(model: PreTrainedModel, text: Text, rows: dict[int, Tensor]) -> dict[str, Any] | None:
    """The shipped aligner of a model, and its loss on the rows that did not choose."""
    name = checkpoints.default_aligner(model.config.name_or_path, max(rows))
    if name is None or lack_of_aligner(model, max(rows)):
        return None
    losses = by_label(streamed(model, text, rows, "kvalign", aligner=name)[:, 1::2])
    return {"aligner": name, "val_nll": losses.mean().item()}


def _is_better(losses: Tensor, others: Tensor) -> bool:
    """Return whether the 95 % interval of the ratio of perplexities lies below 1; of labels too few
    for one, but at least 30, whether the mean difference lies three standard errors below 0.
    """
    difference = losses - others
    _, high = interval(difference)
    if high is not None:
        return high < 1
    if len(difference) < 30:
        return False
    return bool(difference.mean() + 3 * difference.std() / len(difference) ** 0.5 < 0)


def num_judged_tokens(aligner: Aligner, text: Text, kvs: Parts) -> int:
    """Number of tokens that `judge` counts for the progress."""
    rows = excerpts(text, aligner.config.chunk_len - 1).values()
    return (2 ** len(kvs) * 2 + 2) * sum(ids.numel() for ids in rows)


def use_parts(aligner: Aligner, trained: Weights, untrained: Weights, parts: Parts) -> None:
    """Give an aligner the trained weights of these parts and the untrained ones of the others. A
    weight's name begins with its part: `key_scale` and `table.key` belong to `key`.
    """
    weights = {}
    for name in trained:
        words = {word.partition("_")[0] for word in name.split(".")}
        is_used = any(kv in parts for kv in TARGETS if kv in words) or (
            parts and not words & {*TARGETS}
        )
        weights[name] = trained[name] if is_used else untrained[name]
    aligner.load_state_dict(weights)


def excerpts(text: Text, largest: int) -> dict[int, Tensor]:
    """Cache sizes, each with rows [B, C + 1 + labels] of the validation part, without overlap. B is
    even, and rows end with the same labels at all sizes.
    """
    row_len = min(map(len, text.val)) // 2
    largest = min(largest, row_len // 2)
    row_len = min(row_len, largest + 1 + ROW_LABELS)
    num_rows = max(1, min(NUM_ROWS // len(text.val), min(map(len, text.val)) // row_len) // 2) * 2
    rows = torch.cat([*text.val_rows(num_rows, row_len)])
    return {
        size: with_prefix(rows[:, largest - size :], text.opening) for size in val_sizes(largest)
    }


def streamed(
    model: PreTrainedModel, text: Text, rows: dict[int, Tensor], name: str, **options: Any
) -> Tensor:
    """Losses [sizes, B, labels] in nats of the labels that rows [B, N] of all cache sizes have in
    common, under a method; nan for labels that do not count.
    """
    by_size = []
    for size, ids in rows.items():
        method = make_method(name, model, cache_size=size, warn=False, **options)
        losses = score(method, ids.to(model.device)).cpu()
        check_losses(losses, method)
        counted = text.counted(ids, size)
        if counted is not None:
            losses[~counted] = torch.nan
        by_size.append(losses.view(len(ids), -1))
        progress.advance(ids.numel())
    return torch.stack(by_size)
