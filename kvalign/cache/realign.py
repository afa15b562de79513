"""Realigners that change entries, and the choice of one for a model.

- `Rotating`: rotary keys stay as they were written, since scores depend only on differences of
  positions. The sinks are rotated to follow. Rarely, all keys are rotated back.
- `FromBirth`: entries without their position are stored beside those that attention sees, which are
  computed anew from them. So an entry is rounded once, however often it moves.
- `Recursive`: entries are moved from the aligner's own last output, as the paper's network needs
  it.
- `OnRead`: entries stay as they were written, without their position, and attention adds it. With
  k = m[p] + s[p] k' and k' stored, the scores of a query are (q k') s[p] + q m[p], and the output
  for weights w is (w s[p]) v' + w m[p]. It is the formula of `TableAligner`, rearranged so that a
  key with its position is never computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, TableAligner
from kvalign.aligners.base import Birth, Flags
from kvalign.aligners.entries import KV
from kvalign.aligners.table import TABLES, Tables
from kvalign.cache.passes import DecodeStep, Step
from kvalign.cache.realigner import Realigner, is_short, positions_of, rotated, running
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.models import kernel
from kvalign.models.architectures import REGISTERED, rotation_of, window_of
from kvalign.models.attention import install
from kvalign.models.rope import Rotation
from kvalign.models.wrapped import no_autograd_modes


class Rotating(Realigner):
    """Rotation of the sinks at each step. Xiao et al. 2024 rotate every key instead."""

    rotation: Rotation

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        return self.from_birth() if is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return FromBirth(self.rotation)

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return running(sizes, self.rotation, context_len)


class FromBirth(Realigner):
    """Realignment from the original form. Keys of a rotary model are rotated back to position 0,
    and from there to their present position; values carry no position. The aligner works between
    the two rotations. Without one each key is still rounded once: for a context length that leaves
    `Rotating` no frame worth the name.
    """

    strategy = "move"

    def __init__(self, rotation: Rotation | None, aligner: Aligner | None = None):
        super().__init__(rotation)
        self.aligner = aligner

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return sizes if self.aligner else replace(sizes, realign_every=1)

    def anchor(self, layer: int, new: KV, birth: Birth, at: Birth, evicting: Flags = False) -> KV:
        unrotated = rotated(self.rotation, layer, new, positions_of(at))
        return self.aligner.anchor(layer, unrotated, birth, evicting) if self.aligner else unrotated

    def place_without_rotation(self, layer: int, stored: KV, move: Move) -> KV:
        return self.aligner.realign(layer, stored, move) if self.aligner else stored

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        placed = self.place_without_rotation(layer, stored, move)
        return rotated(self.rotation, layer, placed, -move.now)


class Recursive(Realigner):
    """Aligner that is applied to its own output, after the rotation if there is one."""

    strategy, recursive = "move", True
    aligner: Aligner

    def __init__(self, rotation: Rotation | None, aligner: Aligner):
        super().__init__(rotation)
        self.aligner = aligner

    def from_birth(self) -> Realigner:
        raise UserError(
            f"an aligner of kind {self.aligner.kind} moves all entries by one shift: policies "
            "other than oldest, and a memory, need one that places each entry by itself (table, "
            "table-network)"
        )

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        return self.aligner.realign(layer, rotated(self.rotation, layer, stored, move.shift), move)


@no_autograd_modes()
def realigner_of(
    model: PreTrainedModel, aligner: Aligner | None = None, cache_size: int = 0
) -> Realigner | None:
    """Return the realigner for a model's entries. Without an aligner it is StreamingLLM's: rotation
    for rotary positions and nothing elsewhere. With tables, places may be squeezed.
    """
    rotation = rotation_of(model)
    if aligner is None:
        return Rotating(rotation) if rotation else None
    aligner = aligner.to(model.device)
    if not isinstance(aligner, TableAligner):
        return Recursive(rotation, aligner) if aligner.recursive else FromBirth(rotation, aligner)
    aligner, positions = aligner.squeezed(cache_size)
    moving = FromBirth(rotation, aligner)
    moving.place_positions = positions
    return OnRead(model, aligner, moving) if model.config.model_type in REGISTERED else moving


class _Alike(NamedTuple):
    """Order of the entries after the sinks in rows with the same places.

    Attributes:
        ranks: [S - num_sinks] int64, of each slot its entry's number in the order of time; 0 where
            none is.
        order: as of `Step.window_order`.
        key_scales, value_scales: of the slots in all layers, [L, H, S - num_sinks].
    """

    ranks: Tensor
    order: Tensor
    key_scales: Tensor
    value_scales: Tensor


class OnRead(Realigner):
    """Tables on architectures whose attention is a function in transformers' registry.

    Args:
        moving: gives the same result by rewriting entries.
    """

    strategy = "read"

    def __init__(self, model: PreTrainedModel, table: TableAligner, moving: Realigner):
        super().__init__(rotation_of(model))
        self.config, self.table, self.moving = model.config, table.to(model.device), moving
        self.place_positions = moving.place_positions
        self._tables: list[Tables] = []
        self._networks: list[Sequence[Tensor] | None] = []
        install(self.config)

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        window = window_of(self.config)
        if window is not None and window <= sizes.cache_size:
            return self.moving  # which leaves it to the model what a layer sees
        return self.moving if self.rotation and is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return self.moving

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return running(sizes, self.rotation, context_len) if self.rotation else sizes

    def prepare(self) -> None:
        """Take the tables of all layers as they are now."""
        install(self.config)
        of_tables = (getattr(self.table, name) for name in TABLES)
        # A tensor of inference mode counts no changes.
        version = tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in of_tables)
        if self.version != version:
            with no_autograd_modes():
                layers = range(len(self.table.key))
                self._tables = [self._tables_of(layer) for layer in layers]
                self._networks = [self.table.network_of(layer) for layer in layers]
            self.version = version

    def describe(self, step: Step, decode: DecodeStep, dtype: torch.dtype) -> DecodeStep:
        """Add rows of the tables for our kernel (`Step.rows`), or how entries lie (`_Alike`)."""
        table = self.table
        if kernel.attends(table.key, dtype):
            return replace(decode, reading=step.rows)
        if decode.birth is None or not step.is_even:
            return decode
        assert decode.places is not None
        num_sinks = step.sizes.num_sinks
        ranks = (decode.places[0, num_sinks:] - num_sinks).clamp_min(0)
        order = step.window_order if decode.order is None else decode.order
        places = ranks + step.first_place
        of_all = (table.key_scale, table.value_scale)
        scales = (x.index_select(-1, places.to(x.device)) for x in of_all)
        return replace(decode, reading=_Alike(ranks, order, *scales))

    def anchor(self, layer: int, new: KV, birth: Birth, at: Birth, evicting: Flags = False) -> KV:
        """Return the entries to store. On a rotary model the mean is rotated to the position of the
        keys, which stay there.
        """
        table = self.table
        if self.rotation is None:
            return table.anchor(layer, new, birth, evicting)
        mean = table.key[layer, :, birth]  # [H, S, D], or [B, H, S, D] once it is rotated
        mean = self.rotation.at(layer).shift(mean, -positions_of(at))
        keys = (new.keys - mean) / table.key_scale[layer, :, birth, None]
        return KV(keys, table.anchor(layer, new, birth).values)

    def write(self, step: Step, layer: int, ring: KV, new: KV) -> bool:
        decode = step.decode
        is_ours = decode is not None and isinstance(decode.reading, Tensor)
        if not is_ours or self.rotation is not None or not kernel.writes(ring.keys, new.keys):
            return False
        assert decode is not None
        network = () if decode.evicting is False else self._networks[layer]
        if network is None or isinstance(decode.evicting, Tensor):
            return False
        kernel.write(ring, decode.slot, new, step.count.births, self.tables(layer), network)
        return True

    def read(self, layer: int, stored: KV, now: Tensor, at: Tensor) -> KV:
        table = self.table
        means = table.key[layer, :, now]
        if self.rotation is not None:
            means = self.rotation.at(layer).shift(means, -at)
        values = table.value[layer, :, now]
        return KV(
            torch.addcmul(means, stored.keys, table.key_scale[layer, :, now, None]),
            torch.addcmul(values, stored.values, table.value_scale[layer, :, now, None]),
        )

    def tables(self, layer: int) -> Tables:
        """Tables of a layer, mean keys rotated to their positions: as `prepare` found them, unless
        gradients are recorded.
        """
        return self._tables_of(layer) if torch.is_grad_enabled() else self._tables[layer]

    def attend(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention with sinks at their own positions; rows may have unequal lengths."""
        tables, decode = self.tables(layer), step.decode
        placed = None
        if self.rotation is not None:
            placed = self.rotation.at(layer).shift(query, step.behind_rows.to(keys.device))
        num_sinks = min(step.sizes.num_sinks, keys.shape[2])
        reading = None if decode is None else decode.reading
        if isinstance(reading, Tensor) and bias is None:
            of_slots = reading, query, keys, values, scale
            return kernel.attend(*of_slots, tables=tables, asking=placed, num_sinks=num_sinks)
        of_both = query, placed, keys, values
        if not isinstance(reading, _Alike):
            return _read_uneven(*of_both, tables, num_sinks, scale, bias, step)
        ranks, order = (x.to(keys.device) for x in (reading.ranks, reading.order))
        places = slice(step.first_place, step.first_place + len(order))
        hidden = ~step.visible[:, None, None].to(keys.device) if step.hides else None
        means = tables.key_means[:, places], tables.value_means[:, places]
        of_step = Tables(*means, reading.key_scales[layer], reading.value_scales[layer])
        return read_alike(*of_both, of_step, ranks, order, num_sinks, scale, bias, hidden)

    def _tables_of(self, layer: int) -> Tables:
        table, means = self.table, self.table.key[layer]
        if self.rotation is not None:
            now = torch.arange(means.shape[1], device=means.device)
            means = self.rotation.at(layer).shift(means, -now)
        return Tables(means, table.value[layer], table.key_scale[layer], table.value_scale[layer])


def read_alike(
    query: Tensor,
    placed: Tensor | None,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    ranks: Tensor,
    order: Tensor,
    num_sinks: int,
    scale: float,
    bias: Tensor | None,
    hidden: Tensor | None,
) -> Tensor:
    """Attention [B, 1, H, D] of a query over entries [B, H_kv, S, D] in rows with the same places.
    Positions are read and written in the order of time, and numbers go from there to the slots and
    back: no table is copied.

    Args:
        query: [B, H, 1, D].
        placed: the same at its place, where keys rotate; None: they do not.
        tables: means of the places of the W entries after the sinks, and scales of the slots after
            the sinks.
        ranks, order: as of `_Alike`.
        scale: of the query.
        bias: [B, H_kv, S] float32, added to the scores; None: none.
        hidden: [B or 1, 1, 1, S] bool, slots that are not of their row; None: none.
    """
    in_place = not torch.is_grad_enabled()  # scores are overwritten, unless gradients are recorded
    mul, add = (Tensor.mul_, Tensor.add_) if in_place else (Tensor.mul, Tensor.add)
    scores, placed = _scores(query, placed, keys, scale)
    sinks, window = scores.tensor_split([num_sinks], -1)
    window = mul(window, tables.key_scales[:, None])
    of_position = _by_head(placed, tables.key_means.mT)
    window = add(window, of_position.index_select(-1, ranks))
    if not in_place:
        scores = torch.cat([sinks, window], -1)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if bias is not None:
        scores = add(scores, bias[:, :, None])
    weights = scores.softmax(-1)
    sinks, window = weights.tensor_split([num_sinks], -1)
    out = _by_head(window.index_select(-1, order), tables.value_means)
    window = mul(window, tables.value_scales[:, None])
    weights = weights if in_place else torch.cat([sinks, window], -1)
    return _output(weights, values, out, query)


def _read_uneven(
    query: Tensor,
    placed: Tensor | None,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    num_sinks: int,
    scale: float,
    bias: Tensor | None,
    step: Step,
) -> Tensor:
    """Same for rows whose entries have their own positions; tables of all positions."""
    scores, placed = _scores(query, placed, keys, scale)
    ranks = step.places.expand(len(scores), -1).to(scores.device)
    births, stored = (
        torch.tensor(x, device=scores.device)[:, None] for x in (step.births, step.stored)
    )
    inside, visible = ranks >= num_sinks, ranks >= 0
    # [B, 1, 1, S] each; 0 at sinks and at what a row lacks.
    places, inside, visible = (
        x[:, None, None] for x in ((ranks + births - stored) * inside, inside, visible)
    )

    def of_slots(scales: Tensor) -> Tensor:  # [H, P] -> [B, H, 1, S]
        return scales[:, places[:, 0, 0]].transpose(0, 1)[:, :, None]

    of_position = _by_head(placed, tables.key_means.mT).gather(-1, places.expand_as(scores))
    scores = torch.where(inside, scores * of_slots(tables.key_scales) + of_position, scores)
    scores = scores.masked_fill(~visible, -torch.inf)
    if bias is not None:
        scores = scores + bias[:, :, None]
    weights = scores.softmax(-1)
    shares = weights.new_zeros(*weights.shape[:-1], tables.value_means.shape[1])
    shares = shares.scatter_add(-1, places.expand_as(weights), weights * inside)
    out = _by_head(shares, tables.value_means)
    weights = torch.where(inside, weights * of_slots(tables.value_scales), weights)
    return _output(weights, values, out, query)


def _scores(
    query: Tensor, placed: Tensor | None, keys: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores [B, H_kv, G, S] of a query [B, H, 1, D], and the query at its place by the heads of
    keys, scaled, [B, H_kv, G, D]; both float32.
    """

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (keys.shape[1], -1)).squeeze(3) * scale

    query = grouped(query)
    placed = query if placed is None else grouped(placed)
    return (query @ keys.mT).float(), placed.float()


def _output(weights: Tensor, values: Tensor, of_position: Tensor, query: Tensor) -> Tensor:
    """Output [B, 1, H, D] for weights [B, H_kv, G, S] and the part that comes from positions, in
    the query's dtype.
    """
    out = of_position + weights.to(values.dtype) @ values
    return out.to(query.dtype).flatten(1, 2)[:, None]


def _by_head(x: Tensor, table: Tensor) -> Tensor:
    """x [B, H, G, M] @ table [H, M, N], shared by the rows of a batch: [B, H, G, N]. It is one
    product for each head; with broadcasting the table would be copied for each row.
    """
    num_rows, num_heads, num_groups, _ = x.shape
    product = x.transpose(0, 1).flatten(1, 2) @ table  # [H, B * G, N]
    return product.view(num_heads, num_rows, num_groups, -1).transpose(0, 1)
