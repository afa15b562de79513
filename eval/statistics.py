"""How sure a perplexity is, and whether it drifts: from the loss of each token.

Neighbouring tokens are alike, so the bootstrap draws blocks of them (Künsch 1989).
"""

import math

import torch
from torch import Tensor

BLOCK_LEN = 100  # labels
NUM_DRAWS = 2000
CONFIDENCE = 0.95


def interval(nll: Tensor, seed: int = 0) -> tuple[float, float]:
    """95 % interval of exp(mean) of nll [N], in nats; of a paired difference: of the ratio.

    Fewer labels than two blocks give an infinite interval.
    """
    num_blocks = len(nll) // BLOCK_LEN
    if num_blocks < 2:
        return 0.0, math.inf
    blocks = nll[: num_blocks * BLOCK_LEN].double().view(num_blocks, -1).mean(1)
    rng = torch.Generator().manual_seed(seed)
    draws = torch.randint(num_blocks, (NUM_DRAWS, num_blocks), generator=rng)
    tail = (1 - CONFIDENCE) / 2
    ends = blocks[draws].mean(1).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    low, high = ends.exp().tolist()
    return low, high


def by_segment(nll: Tensor, cache_size: int) -> list[dict[str, float]]:
    """Perplexity as the stream goes on, of nll [N]: segments in units of the cache size.

    They end at 1, 2, 4, 8, ... cache sizes after the cache filled, since what compounds with each
    eviction shows within the first few; a last piece shorter than half its segment joins the one
    before. Of a paired difference: the ratio.

    Returns:
        Dicts of `start`, `end` (cache sizes since the cache filled) and `perplexity`.
    """
    ends = [cache_size]
    while ends[-1] < len(nll):
        ends.append(2 * ends[-1])
    if len(ends) > 1 and len(nll) < 3 * ends[-2] // 2:
        ends.pop()
    ends[-1] = len(nll)
    starts = [0, *ends[:-1]]
    return [
        {
            "start": start / cache_size,
            "end": end / cache_size,
            "perplexity": nll[start:end].double().mean().exp().item(),
        }
        for start, end in zip(starts, ends, strict=True)
    ]


def by_quarter(nll: Tensor) -> list[float]:
    """Perplexity of each quarter of the labels [N], in order."""
    return [part.double().mean().exp().item() for part in nll.tensor_split(4) if len(part)]
