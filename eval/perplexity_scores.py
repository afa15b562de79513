"""The losses of every method on the same labels, and the figures that are made of them.

A method scores a text step by step, or by a faster way with the same result (`kvalign.scoring`),
unless every method is made to step.
"""

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvalign.data_gen.corpora import token_pieces
from kvalign.errors import UserError
from kvalign.eval.evaluation import Row
from kvalign.eval.grid import sizes_of
from kvalign.eval.loss_store import LossStore, key_of
from kvalign.eval.statistics import by_quarter, by_segment, interval
from kvalign.methods.base import Method
from kvalign.models import LoadedModel
from kvalign.scoring import score, score_stepwise


def read_ids(loaded: LoadedModel, corpus: str, num_ids: int) -> Tensor:
    """The first tokens of a corpus's test part: [1, num_ids] int64 on the model's device."""
    ids: list[int] = []
    for piece in token_pieces(corpus, loaded.tokenizer, "test"):
        ids += piece
        if len(ids) >= num_ids:
            return torch.tensor([ids[:num_ids]], device=loaded.model.device)
    raise UserError(
        f"corpus {corpus!r} has {len(ids)} tokens, {num_ids} are needed: lower --num-tokens"
    )


def score_methods(
    methods: Iterable[Method],
    ids: Tensor,
    num_labels: int,
    *,
    stepwise: bool = False,
    reference: str | None = None,
    store: LossStore | None = None,
) -> list[Row]:
    """A row for each method, of the losses of the `num_labels` that follow its first input.

    Args:
        methods: any.
        ids: [1, N] int64, long enough for the largest cache and the labels.
        num_labels: to score.
        stepwise: one step a token even where a faster way gives the same figures.
        reference: name of the method that each row is compared with.
        store: where losses are kept and taken from.
    """
    methods, store = list(methods), store or LossStore(None)
    rows, losses = [], []
    with tqdm(total=len(methods) * num_labels, unit="label", smoothing=0.05) as bar:
        for method in methods:
            bar.set_description(f"{method.name} C={method.sizes.cache_size}")
            scored = ids[:, : method.sizes.first_input_len + num_labels]
            key = key_of(method, scored, stepwise)
            labels = scored[0, -num_labels:]
            kept = store.get(key, labels)
            if kept is not None:
                nll, seconds = kept
                bar.update(num_labels)
            else:
                start = time.perf_counter()
                nll = (score_stepwise if stepwise else score)(method, scored, bar.update)
                seconds = time.perf_counter() - start
                store.put(key, labels, nll, seconds)
            losses.append(nll.cpu())
            rows.append(_row(method, losses[-1], seconds))
    if reference:
        compare(rows, losses, reference)
    return rows


def _row(method: Method, nll: Tensor, seconds: float) -> Row:
    mean = nll.double().mean().item()
    low, high = interval(nll)
    return {
        **sizes_of(method),
        "num_labels": len(nll),
        "nll_nats": mean,
        "perplexity": math.exp(mean),
        "low": low,
        "high": high,
        "quarters": by_quarter(nll),
        "segments": by_segment(nll, method.sizes.cache_size),
        "seconds": seconds,
    }


def compare(rows: list[Row], losses: list[Tensor], reference: str) -> None:
    """Add to each row how its losses [N] compare with those of the reference of the same sizes, or
    of the same cache if there is none: ratio, its interval, drift, and the ratio of each segment.
    """
    for row, nll in zip(rows, losses, strict=True):
        same = [
            i
            for i, other in enumerate(rows)
            if other["method"] == reference and other["cache_size"] == row["cache_size"]
        ]
        closest = [i for i in same if rows[i]["num_evicted"] == row["num_evicted"]] or same
        difference = nll - losses[closest[0]]
        quarters = by_quarter(difference)
        low, high = interval(difference)
        row |= {
            "ratio": math.exp(difference.double().mean().item()),
            "ratio_low": low,
            "ratio_high": high,
            "drift": quarters[-1] / quarters[0],
        }
        paired = by_segment(difference, row["cache_size"])
        for segment, other in zip(row["segments"], paired, strict=True):
            segment["ratio"] = other["perplexity"]
