"""Perplexity of streaming methods, by one protocol for all.

    ids     0 1 ... C | C+1 C+2 ... C+num_tokens
            first input  labels, one at a time

exp(mean NLL) over the labels; at one cache size every method is scored on the same ones. A method
scores a text step by step, or by a faster way with the same result: a batch of windows at once
where it re-encodes clean windows anyway (`recompute`, `discard-half`), whole segments in the
relative form where its realignment starts from birth (`window`, `streaming-llm`, `kvalign` with a
table). So `seconds` is the harness's time and no measure of a method's speed, unless every method
was made to step (`--stepwise`); `kvalign eval latency` measures it best.
"""

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from tqdm.auto import tqdm

from kvalign.data_gen.corpora import token_pieces
from kvalign.errors import UserError
from kvalign.eval.cells import Cells, key_of
from kvalign.eval.document import document
from kvalign.eval.grid import check_names, make_grid, sizes_of
from kvalign.eval.settings import PerplexitySettings
from kvalign.eval.statistics import by_quarter, by_segment, interval
from kvalign.methods.base import Method
from kvalign.models import LoadedModel, load_model
from kvalign.scoring import score as score_fast
from kvalign.scoring import score_stepwise

log = logging.getLogger(__name__)


def evaluate(settings: PerplexitySettings) -> dict[str, Any]:
    """Score every method at every cache size and number evicted.

    Returns:
        A document whose rows have method, aligner (kind and objective; None for methods without
        one), cache_size, num_sinks, num_evicted, num_labels, nll_nats (mean a label), perplexity,
        low, high (its 95 % interval), quarters (perplexity of each quarter of the labels),
        segments (see `by_segment`), seconds; and with a reference: ratio (perplexity by that of
        the reference at the same cache size and number evicted, on the same labels), ratio_low,
        ratio_high, drift (how the ratio changed from the first quarter of the labels to the last,
        1: not) and the ratio of each segment.

    Raises:
        UserError: wrong settings, or a corpus shorter than the largest cache and the labels;
            before any work.
    """
    started = time.perf_counter()
    check_names(settings)
    if settings.reference and settings.reference not in settings.methods:
        raise UserError(f"--reference {settings.reference} is not among --methods")
    loaded = load_model(settings.model, settings.device, settings.dtype)
    methods = make_grid(settings, loaded.model)
    longest = max(settings.cache_sizes) + 1 + settings.num_tokens
    ids = read_ids(loaded, settings.corpus, longest)
    cells = Cells(settings.keep)
    rows = score(
        methods,
        ids,
        settings.num_tokens,
        stepwise=settings.stepwise,
        reference=settings.reference,
        cells=cells,
    )
    return document("eval perplexity", settings, rows, started=started)


def read_ids(loaded: LoadedModel, corpus: str, num_ids: int) -> torch.Tensor:
    """The first tokens of a corpus's test part: [1, num_ids] int64 on the model's device."""
    ids: list[int] = []
    for piece in token_pieces(corpus, loaded.tokenizer, "test"):
        ids += piece
        if len(ids) >= num_ids:
            return torch.tensor([ids[:num_ids]], device=loaded.model.device)
    raise UserError(
        f"corpus {corpus!r} has {len(ids)} tokens, {num_ids} are needed: lower --num-tokens"
    )


def score(
    methods: Iterable[Method],
    ids: torch.Tensor,
    num_labels: int,
    *,
    stepwise: bool = False,
    reference: str | None = None,
    cells: Cells | None = None,
) -> list[dict[str, Any]]:
    """Rows of `evaluate` for methods that are ready, on ids [1, N]."""
    methods, cells = list(methods), cells or Cells(None)
    rows, losses = [], []
    with tqdm(total=len(methods) * num_labels, unit="label", smoothing=0.05) as bar:
        for method in methods:
            bar.set_description(f"{method.name} C={method.sizes.cache_size}")
            own = ids[:, : method.sizes.cache_size + 1 + num_labels]
            key = key_of(method, own, stepwise)
            kept = cells.get(key, own[0, -num_labels:])
            if kept is not None:
                nll, seconds = kept
                bar.update(num_labels)
            else:
                start = time.perf_counter()
                nll = (score_stepwise if stepwise else score_fast)(method, own, bar.update)
                seconds = time.perf_counter() - start
                cells.put(key, own[0, -num_labels:], nll, seconds)
            losses.append(nll.cpu())
            rows.append(_row(method, losses[-1], seconds))
    if reference:
        _compare(rows, losses, reference)
    return rows


def _row(method: Method, nll: torch.Tensor, seconds: float) -> dict[str, Any]:
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


def _compare(rows: list[dict[str, Any]], losses: list[torch.Tensor], reference: str) -> None:
    """Add each row's ratio to the reference of the same sizes; without one, of the same cache."""
    for row, nll in zip(rows, losses, strict=True):
        same = [
            i
            for i, other in enumerate(rows)
            if other["method"] == reference and other["cache_size"] == row["cache_size"]
        ]
        closest = [i for i in same if rows[i]["num_evicted"] == row["num_evicted"]] or same
        base = losses[closest[0]]
        quarters = by_quarter(nll - base)
        low, high = interval(nll - base)
        row |= {
            "ratio": math.exp((nll - base).double().mean().item()),
            "ratio_low": low,
            "ratio_high": high,
            "drift": quarters[-1] / quarters[0],
        }
        paired = by_segment(nll - base, row["cache_size"])
        for segment, other in zip(row["segments"], paired, strict=True):
            segment["ratio"] = other["perplexity"]
