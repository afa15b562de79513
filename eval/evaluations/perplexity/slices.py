"""Recall slices: the loss of labels by the distance to their last occurrence in the text.

    ... Ser na do ... Ser [na]      the label na ends the bigram "Ser na": distance to the last na

`bigrams`: by the bigram that a label ends. A model that looks into its context finds what followed
the last time; a model that has forgotten the place does not. These are the "AR hits" of Arora et
al. 2023 (Zoology), who leave out bigrams that are frequent in the training text; here all count,
since that text is not available. `tokens`: by the label's token alone, over longer distances. Rare
tokens last occurred beyond the cache, where only a memory can find them.

An entry d tokens back is still in the cache up to d = C less the sinks, since a step sees C + 1
entries.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvalign.eval.protocol.statistics import interval

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
        _slice(nll[(far > low * cache_size) & (far <= high * cache_size)])
        | {"from": low, "to": high if math.isfinite(high) else None}
        for low, high in pairwise((0.0, *edges, math.inf))
    ]
    return [*slices, _slice(nll[far == 0]) | {"from": None, "to": None}]


def _slice(nll: Tensor) -> Slice:
    if not len(nll):
        return {"num_labels": 0, "perplexity": None, "low": None, "high": None}
    low, high = interval(nll)
    perplexity = nll.double().mean().exp().item()
    return {"num_labels": len(nll), "perplexity": perplexity, "low": low, "high": high}
