"""Attention of one query of each row over placed entries on CUDA, as one kernel in Triton: what
`attend` of `kernel.cpp` does on a CPU. A program takes one query, and reads the slots in blocks;
what it has summed up so far is scaled down where a block has a greater score.

It was tried in Triton's interpreter, on a CPU, and has never run on a card.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # slots that are read at once


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    places, query, keys, values, asking, key_means, value_means, key_scales, value_scales,
    beside, of_beside, out, log_sums, scale, num_slots, num_places, num_sinks,
    row_of_places, row_of_keys, head_of_keys, row_of_values, head_of_values,
    queries: tl.constexpr, queries_of_head: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, has_tables: tl.constexpr, has_beside: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0)
    row, head = one // queries, one % queries // queries_of_head
    d = tl.arange(0, width)
    is_number = d < dim
    q = tl.load(query + one * dim + d, mask=is_number, other=0.0)
    if has_tables:
        asks = tl.load(asking + one * dim + d, mask=is_number, other=0.0)
    most, total = -float("inf"), 0.0
    sums = tl.zeros([width], dtype=tl.float32)
    for first in range(0, num_slots, block):
        s = first + tl.arange(0, block)
        at = tl.load(places + row * row_of_places + s, mask=s < num_slots, other=-1)
        is_seen = at >= 0
        of_slot = s[:, None] * dim + d[None]
        is_of_entry = is_seen[:, None] & is_number[None]
        own = keys + row * row_of_keys + head * head_of_keys
        k = tl.load(own + of_slot, mask=is_of_entry, other=0.0).to(tl.float32)
        own = values + row * row_of_values + head * head_of_values
        v = tl.load(own + of_slot, mask=is_of_entry, other=0.0).to(tl.float32)
        scores = tl.sum(k * q[None], 1)
        if has_tables:
            is_placed = at >= num_sinks
            in_table = head * num_places + at
            of_mean, is_of_mean = (
                in_table[:, None] * dim + d[None],
                is_placed[:, None] & is_number[None],
            )
            mean = tl.load(key_means + of_mean, mask=is_of_mean, other=0.0)
            scores = scores * tl.load(key_scales + in_table, mask=is_placed, other=1.0)
            scores += tl.sum(mean * asks[None], 1)
            mean = tl.load(value_means + of_mean, mask=is_of_mean, other=0.0)
            v = v * tl.load(value_scales + in_table, mask=is_placed, other=1.0)[:, None] + mean
        scores = tl.where(is_seen, scores * scale, -float("inf"))
        greatest = tl.maximum(most, tl.max(scores, 0))
        base = tl.where(greatest == -float("inf"), 0.0, greatest)  # nothing is seen so far
        weights, kept = tl.exp(scores - base), tl.exp(most - base)
        total = total * kept + tl.sum(weights, 0)
        sums = sums * kept + tl.sum(weights[:, None] * v, 0)
        most = greatest
    result = sums / tl.where(total == 0.0, 1.0, total)
    log_sum = most + tl.log(total)
    if has_beside:
        share = 1.0 / (1.0 + tl.exp(log_sum - tl.load(of_beside + one)))
        other = tl.load(beside + one * dim + d, mask=is_number, other=0.0)
        result += share * (other - result)
    tl.store(out + one * dim + d, result, mask=is_number)
    tl.store(log_sums + one, log_sum)


def attend(
    places: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    tables: Sequence[Tensor] | None = None,
    asking: Tensor | None = None,
    num_sinks: int = 0,
    beside: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query [B, H, 1, D] of each row: [B, 1, H, D], and log_sums [B, H];
    arguments are as of `kvalign.models.kernel.attend`, but that heads are of any size, and
    slots of floats.
    """
    (num_rows, num_queries, _, dim), (num_heads, num_slots) = query.shape, keys.shape[1:3]
    query, places = query.float().contiguous(), places.contiguous()
    asking = query if asking is None else asking.float().contiguous()
    keys, values = (x if x.stride()[2:] == (dim, 1) else x.contiguous() for x in (keys, values))
    of_tables = (query,) * 4 if tables is None else tuple(x.contiguous() for x in tables)
    of_beside = (query,) * 2 if beside is None else tuple(x.float().contiguous() for x in beside)
    out = query.new_empty(num_rows, 1, num_queries, dim)
    log_sums = query.new_empty(num_rows, num_queries)
    _attend[(num_rows * num_queries,)](
        places, query, keys, values, asking, *of_tables, *of_beside, out, log_sums,
        scale, num_slots, of_tables[0].shape[1], num_sinks,
        0 if len(places) == 1 else num_slots, *keys.stride()[:2], *values.stride()[:2],
        queries=num_queries, queries_of_head=num_queries // num_heads, dim=dim,
        width=triton.next_power_of_2(dim), block=BLOCK,
        has_tables=tables is not None, has_beside=beside is not None,
    )  # fmt: skip
    return out, log_sums
