"""Recall slices: the loss of labels that end a bigram which the text had before, by how far back.

    ... Ser na do ... Ser [na]      the label na ends the bigram "Ser na": distance to the last na

A model that looks into its context finds what followed the last time; one that has lost the place
does not (the "AR hits" of Arora et al. 2023, Zoology, who leave out bigrams that are frequent in
the training text; here all count, since that text is not at hand). A bigram d tokens back is still
in the cache up to d = C less the sinks: a step sees C + 1 entries.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvalign.eval.protocol.statistics import interval

EDGES = (0.25, 0.5, 0.75, 1.0, 2.0, math.inf)
"""Where slices end, in cache sizes; after the last one comes that of labels which repeat none."""

Slice = dict[str, float | None]


def distances(ids: Sequence[int]) -> Tensor:
    """For each of a text's ids, how many tokens back the bigram that it ends was there last, [N]
    int64; 0: never.
    """
    last: dict[tuple[int, int], int] = {}
    found = [0] * len(ids)
    for i, bigram in enumerate(pairwise(ids), 1):
        found[i] = i - last.get(bigram, i)
        last[bigram] = i
    return torch.tensor(found)


def slices(nll: Tensor, far: Tensor, cache_size: int) -> list[Slice]:
    """What the labels of each slice lose, of nll [N] in nats and their distances [N]; of a paired
    difference: the ratio.

    Returns:
        For each slice `from` and `to` (in cache sizes: above the one, up to the other; both None:
        the bigram is new), num_labels, and perplexity, low, high (95 %, moving blocks of the
        slice's own labels), None of no labels.
    """
    found = [
        _slice(nll[(far > low * cache_size) & (far <= high * cache_size)])
        | {"from": low, "to": high if math.isfinite(high) else None}
        for low, high in pairwise((0.0, *EDGES))
    ]
    return [*found, _slice(nll[far == 0]) | {"from": None, "to": None}]


def _slice(nll: Tensor) -> Slice:
    if not len(nll):
        return {"num_labels": 0, "perplexity": None, "low": None, "high": None}
    low, high = interval(nll)
    perplexity = nll.double().mean().exp().item()
    return {"num_labels": len(nll), "perplexity": perplexity, "low": low, "high": high}
