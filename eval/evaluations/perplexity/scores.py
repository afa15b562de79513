"""Losses of every method on the same labels, and the figures from them. Recall slices are the loss
of labels by the distance to their last occurrence in the text:

    ... Ser na do ... Ser [na]      the label na ends the bigram "Ser na": distance to the last na

`bigrams` are the "AR hits" of Arora et al. 2023 (Zoology), who leave out bigrams that are frequent
in the training text; here all count, since that text is not available. An entry d tokens back is
still in the cache up to d = C less the sinks, since a step sees C + 1 entries.

Losses of every scored token are kept in a Parquet file for each method and size, with all losses
after the method's first input: so a longer run serves a shorter one, and one of other cache sizes.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kvalign.eval.protocol.data import OF_POLICY, Row
from kvalign.eval.protocol.document import say_damaged
from kvalign.eval.protocol.grid import losses_key, one_by_one, sizes_of
from kvalign.foundation.files import write_whole
from kvalign.foundation.folders import as_file_name
from kvalign.foundation.machine import wait_for
from kvalign.foundation.statistics import by_part, by_segment, interval
from kvalign.methods.base import Method
from kvalign.streaming.scoring import check_losses, score, score_stepwise

log = logging.getLogger(__name__)

_OF_RATIO = {"": "perplexity", "_low": "low", "_high": "high"}
"""What a figure of a paired difference is called in a row, after `ratio`."""


class Labels(Protocol):
    """Settings of what is scored: `num_tokens` labels, from a first one by the cache size on; step
    by step, and with a folder that keeps losses, or not.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def stepwise(self) -> bool: ...
    @property
    def keep(self) -> Path | None: ...
    def first_label_of(self, cache_size: int) -> int: ...


class Distances(NamedTuple):
    """Distances [N] int64 of a text's tokens (`distances`), and the ends of slices by them, in
    cache sizes.
    """

    far: Tensor
    edges: Sequence[float]


NO_SLICES: Mapping[str, Distances] = {}


def score_all(
    methods: Sequence[Method],
    ids: Tensor,
    settings: Labels,
    far: Mapping[str, Distances] = NO_SLICES,
) -> tuple[list[Row], list[Tensor]]:
    """Rows of methods, and their losses [num_tokens], of ids [1, N] int64. Every token after a
    method's first input is scored and kept, so that its losses also serve runs of other cache
    sizes. Those before the first label are dropped.
    """
    rows, losses, num_labels = [], [], settings.num_tokens
    score_with = score_stepwise if settings.stepwise else score
    for method, bar in one_by_one(methods, num_ids := ids.shape[1], "tokens"):
        cache_size, first_input_len = method.sizes.cache_size, method.sizes.first_input_len
        first_label = settings.first_label_of(cache_size)
        streamed = ids[:, : first_label + num_labels]
        after, key = streamed[0, first_input_len:], losses_key(method, streamed, settings.stepwise)
        if settings.keep and (record := read_losses(settings.keep, key, after)):
            nll, seconds = record
            bar.skip(num_ids)
        else:
            bar.skip(num_ids - len(after))
            start = time.perf_counter()
            nll = score_with(method, streamed, bar.update)
            wait_for(nll.device)
            seconds = time.perf_counter() - start
            check_losses(nll, method)
            if settings.keep:
                write_losses(settings.keep, key, after, nll, seconds)
        losses.append(nll[-num_labels:].cpu())
        figures = of_losses(losses[-1], cache_size, first_label, far)
        seconds *= num_labels / len(after)
        rows.append({**sizes_of(method), **figures, "seconds": seconds})
    return rows, losses


def warn_of_guesses(rows: Sequence[Row], vocab_size: int, corpus: str) -> None:
    """Warn if the intervals of all perplexities lie above the order of magnitude of the vocabulary.
    Too few labels for an interval give no warning.
    """
    if min(row["low"] for row in rows) > 10 ** math.floor(math.log10(vocab_size)):
        log.warning(
            "the lowest perplexity is about that of guessing among %d tokens: corpus %r, or its "
            "encoding, may be the wrong text for this model, or the tokenizer may not belong to it",
            vocab_size,
            corpus,
        )


def of_losses(
    nll: Tensor, cache_size: int, first_label: int, far: Mapping[str, Distances] = NO_SLICES
) -> Row:
    """Figures of losses [N] in nats; for a paired difference: ratios.

    Returns:
        first_label (its place in the text), num_labels, nll_nats (mean per label), perplexity, low
        and high (of its 95 % interval; high is None with too few labels), tenths (perplexity of
        each tenth of the labels), segments (`by_segment`), and the `slices` by each of the
        distances.
    """
    return {
        "first_label": first_label,
        "nll_nats": nll.double().mean().item(),
        **_figures(nll),
        "tenths": [{"perplexity": one} for one in by_part(nll, 10)],
        "segments": by_segment(nll, cache_size, first_label - cache_size - 1),
        **{
            name: slices(nll, one.far[first_label:][: len(nll)], cache_size, one.edges)
            for name, one in far.items()
        },
    }


def compare(
    rows: list[Row], losses: list[Tensor], reference: str, far: Mapping[str, Distances] = NO_SLICES
) -> None:
    """Add to each row the comparison of its losses [N] with those of the reference (`_base`):
    ratio, its interval, drift, and the ratio of each tenth, segment and slice.
    """
    for row, nll in zip(rows, losses, strict=True):
        difference = nll - _base(row, rows, losses, reference)
        ratios = of_losses(difference, row["cache_size"], row["first_label"], far)
        quarters = by_part(difference, 4)
        row |= {f"ratio{end}": ratios[name] for end, name in _OF_RATIO.items()}
        row["drift"] = quarters[-1] / quarters[0]
        for name in ("tenths", "segments", *far):
            for one, other in zip(row[name], ratios[name], strict=True):
                one |= {f"ratio{end}": other[x] for end, x in _OF_RATIO.items() if x in other}


def _base(row: Row, rows: list[Row], losses: list[Tensor], reference: str) -> Tensor:
    """The reference's losses that a row is compared with: of its first sinks and policy, those of
    as many evicted at once if there are.
    """
    bases, size = zip(rows, losses, strict=True), row["cache_size"]
    names = ("num_sinks", *OF_POLICY)
    same = [(r, x) for r, x in bases if (r["method"], r["cache_size"]) == (reference, size)]
    first = [same[0][0].get(name) for name in names]
    same = [(r, x) for r, x in same if [r.get(name) for name in names] == first]
    closest = [x for r, x in same if r["num_evicted"] == row["num_evicted"]] or [same[0][1]]
    return closest[0]


Slice = dict[str, float | None]


def distances(ids: Sequence[int], length: int) -> Tensor:
    """Distances in tokens, for each of a text's ids, to the last occurrence of the `length` ids
    that end with it, [N] int64; 0: none.
    """
    last: dict[tuple[int, ...], int] = {}
    distances = [0] * len(ids)
    for i, gram in enumerate(zip(*(ids[n:] for n in range(length)), strict=False), length - 1):
        distances[i] = i - last.get(gram, i)
        last[gram] = i
    return torch.tensor(distances)


def slices(nll: Tensor, far: Tensor, cache_size: int, edges: Sequence[float]) -> list[Slice]:
    """Return the loss of each slice of labels, from nll [N] in nats and their distances [N]; for a
    paired difference: the ratio.

    Args:
        edges: ends of the slices, in cache sizes; the last slice has everything farther.

    Returns:
        For each slice `from` and `to` (in cache sizes: above the one, up to the other; both None:
        no earlier occurrence), num_labels, and perplexity, low, high (95 %, moving blocks of the
        slice's own labels), None without labels.
    """
    slices = [
        _figures(nll[(far > low * cache_size) & (far <= high * cache_size)])
        | {"from": low, "to": high if math.isfinite(high) else None}
        for low, high in pairwise((0.0, *edges, math.inf))
    ]
    return [*slices, _figures(nll[far == 0]) | {"from": None, "to": None}]


def _figures(nll: Tensor) -> Slice:
    if not len(nll):
        return {"num_labels": 0, "perplexity": None, "low": None, "high": None}
    low, high = interval(nll)
    perplexity = nll.double().mean().exp().item()
    return {"num_labels": len(nll), "perplexity": perplexity, "low": low, "high": high}


def read_losses(folder: Path, key: dict[str, Any], labels: Tensor) -> tuple[Tensor, float] | None:
    """NLL [N] float32 in nats of labels [N] and their share of the seconds for all kept ones, or
    None.
    """
    path = _path(folder, key)
    if not path.exists():
        return None
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        seconds = json.loads(table.schema.metadata[b"kvalign"])["seconds"]
        tokens, nll = (torch.tensor(table.column(n).to_numpy()) for n in ("token", "nll_nats"))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        say_damaged(path)
        return None
    num = len(labels)
    if not torch.equal(tokens[:num], labels.cpu()):
        return None  # fewer, or another text with the same beginning
    return nll[:num], seconds * (num / len(nll))


def write_losses(
    folder: Path, key: dict[str, Any], labels: Tensor, nll: Tensor, seconds: float
) -> None:
    path = _path(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"token": labels.cpu().numpy(), "nll_nats": nll.float().cpu().numpy()},
        metadata={b"kvalign": json.dumps({"key": key, "seconds": seconds}).encode()},
    )
    write_whole(path, lambda partial: pq.write_table(table, partial, write_page_checksum=True))


def _path(folder: Path, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    sizes = f"C{key['cache_size']}-s{key['num_sinks']}-k{key['num_evicted']}"
    label = as_file_name("-".join(filter(None, (key["method"], key["aligner"]))))
    return folder / f"{label}-{sizes}-{digest}.parquet"
