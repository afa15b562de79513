"""Attention over the entries of a cache, each placed for each query.

The entry of token j looks the same to the query of token t however the input was cut: it lies at
its place (`passes.py`). Rotation and tables split what is seen there into a part of the entry and a
part of the place:

    q . (m[p] + s[p] k') = q . m[p] + s[p] (q . k')

So entries that were written once are read at every later place. `placed_attention` is that formula,
the reference. Three others give the same where they can, faster: our kernel (one token, in C++ on a
CPU, in Triton on CUDA), PyTorch's own (nothing is placed when it is read), and bands of its flash
kernels (many tokens, in half precision on CUDA). No code here is for a single architecture
(`kvalign.models.attention`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvalign.aligners.table import Tables
from kvalign.cache.passes import Pass, Sight
from kvalign.models import kernel
from kvalign.models.rope import Rotation


class Recalled(NamedTuple):
    """Attention of some queries over what they take back from a memory, and over that alone."""

    output: Tensor  # [B, H, G, T, D] float32, 0 where there is nothing
    log_sum: Tensor  # [B, H, G, T] float32, logarithm of the sum of the exponentials


Recaller = Callable[[Sight, Tensor], Recalled]
"""Of a sight and its scaled queries [B, H, G, T, D]: what they find in a memory."""


class Reader(NamedTuple):
    """Facts by which attention reads a layer's entries, beside its pass.

    Attributes:
        rotation: of the layer's keys; None: they do not rotate.
        tables: that place entries when they are read; None: they are read as they are.
        network: that corrects new entries, as `kernel.attend` takes it; empty: none does; None: it
            does not fit there.
        angles, bases: of keys that our kernel reads as they are stored, without their position, as
            `kernel.attend` takes them; None: keys do not rotate, or are as attention sees them.
        recall: of a memory; None: there is none.
        new: of the token, as `kernel.attend` takes it and writes it; None: it is written.
    """

    rotation: Rotation | None = None
    tables: Tables | None = None
    network: Sequence[Tensor] | None = ()
    angles: Tensor | None = None
    bases: Tensor | None = None
    recall: Recaller | None = None
    new: Sequence[Tensor] | None = None


def attend(
    step: Pass, reader: Reader, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attention of a pass of one token over the entries of a layer.

    Args:
        query: [B, H, 1, D], at the positions that the model is told.
        keys, values: [B, H_kv, S, D], sinks first: the slots of a step; as they are stored, if our
            kernel reads those.

    Returns:
        [B, 1, H, D].
    """
    # The keys of a step run on, those of its sinks, too; the means of tables do not.
    rotation, tables, recall, recalled = reader.rotation, reader.tables, reader.recall, None
    sight = step.sight_of_one if recall is None else step.sights(step.sizes.num_recalled or 0)[0]
    num_sinks, asking = min(step.sizes.num_sinks, keys.shape[2]), None
    if recall is not None and sight.has_lost:
        recalled = recall(sight, query.unflatten(1, (keys.shape[1], -1)) * scale)
    if rotation is not None and tables is not None:
        asking = rotation.shift(query, step.behind_rows.to(query.device))
    beside = None
    if recalled is not None:
        beside = recalled.output.flatten(1, 3), recalled.log_sum.flatten(1)
    if step.by_kernel and query.is_cpu:
        if rotation is not None and reader.angles is not None:  # which count from the first place
            query = rotation.shift(query, step.behind_rows)
        output, _ = kernel.attend(
            sight.places_of_one,
            query,
            keys,
            values,
            scale,
            angles=reader.angles,
            bases=reader.bases,
            tables=tables,
            asking=asking,
            num_sinks=num_sinks,
            beside=beside,
            new=reader.new,
            network=(reader.network or ()) if step.evicting is True else (),
        )
        return output
    if tables is None and recalled is None:
        return as_they_lie(sight, query, keys, values, scale)
    if kernel.takes_triton(query):
        found = kernel.attend_by_triton(
            sight.places_of_one.to(query.device),
            query,
            keys,
            values,
            scale,
            tables=tables,
            asking=asking,
            num_sinks=num_sinks,
            beside=beside,
        )
        if found is not None:
            return found.to(query.dtype)
    output, _ = placed_attention(
        sight.places,
        query,
        keys,
        values,
        scale,
        tables=tables and tables.first(step.num_places).of_entries(sight.places, num_sinks),
        asking=asking,
        num_sinks=num_sinks,
        recalled=recalled,
    )
    return output.to(query.dtype)


def placed_attention(
    places: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    tables: Tables | None = None,
    asking: Tensor | None = None,
    num_sinks: int = 0,
    window_query: Tensor | None = None,
    recalled: Recalled | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over entries that are placed for each query, in float32: the reference.

    Args:
        places: [B or 1, T, S] int64, as of `Sight`.
        query: [B, H, T, D], as it meets sinks.
        keys, values: [B, H_kv, S, D], sinks first, without their mean and scale if there are
            tables.
        tables: means of P places, and scales of the entries (`Tables.of_entries`).
        asking, window_query: the query as it meets the means of tables, and the entries behind the
            sinks; None: as it is.
        recalled: what the queries take back, as if it were one more entry.

    Returns:
        the output [B, T, H, D], and the weights [B, H_kv, G, T, S] of the entries.
    """
    num_heads, num, places = keys.shape[1], keys.shape[2], places.to(keys.device)

    def grouped(x: Tensor) -> Tensor:
        return x.float().unflatten(1, (num_heads, -1)) * scale  # [B, H_kv, G, T, D]

    own, keys, values = grouped(query), keys.float(), values.float()
    window = own if window_query is None else grouped(window_query)
    of_sinks, of_others = keys.tensor_split([num_sinks], 2)
    sinks, others = _by_head(own, of_sinks.mT), _by_head(window, of_others.mT)
    if tables is not None:
        at = places[..., num_sinks:].clamp_min(0)  # [B or 1, T, W]
        means = _by_head(own if asking is None else grouped(asking), tables.key_means.mT)
        at_all = at[:, None, None].expand_as(others)
        others = others * tables.key_scales + means.gather(-1, at_all)
    of_recalled = () if recalled is None else (recalled.log_sum[..., None],)
    scores = torch.cat([sinks, others, *of_recalled], -1)
    scores[..., :num].masked_fill_((places < 0)[:, None, None], -torch.inf)
    weights, of_memory = scores.softmax(-1).tensor_split([num], -1)
    shares, output = weights, 0.0 if recalled is None else of_memory * recalled.output
    if tables is not None:
        sinks, others = weights.tensor_split([num_sinks], -1)
        of_means = torch.zeros_like(means).scatter_add(-1, at_all, others)
        output = output + _by_head(of_means, tables.value_means)
        shares = torch.cat([sinks, others * tables.value_scales], -1)
    output = output + _by_head(shares, values)
    return output.flatten(1, 2).transpose(1, 2), weights


def _by_head(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, G, T, M] @ y [B, H, M, N] or [H, M, N]: [B, H, G, T, N], a product a head."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def as_they_lie(sight: Sight, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention [B, T, H, D] as of `placed_attention`, of entries that nothing places, by PyTorch's
    kernels.
    """
    on_cpu = query.device.type == "cpu"
    if not on_cpu:  # whose fused kernels take as many heads of each
        keys, values = (
            x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values)
        )
    mask = sight.mask(query.dtype).to(query.device)
    out = scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=on_cpu)
    return out.transpose(1, 2)
