"""Position tables: an entry is standardised at its original position, then given the mean and the
scale of its present one.

    k <- m[p_now] + s[p_now] * (k_born - m[p_born]) / s[p_born]

m[layer, head, p] is the mean key (value) of a layer and head at position p over a corpus, and
s[layer, head, p] its root mean square distance from that mean. Moves telescope: however many
evictions lie between, an entry is computed from its original form. So no error accumulates, and any
number of entries can be evicted at once. It is StreamingLLM's rotation, carried over to learned
positions.

The scale is needed because a layer norm divides the sum of token and position by its size. Where
the position embedding is large (the first positions), the token's part becomes small.

`table-network` has a network beside them, which corrects an entry once, when it is written: x <-
table.anchor(entry) + f(x); then the table alone places x, wherever it goes. Once entries are
evicted, new ones are written at the last position of a full cache. A table knows what entries look
like there on average; the network sees the entry, keys and values of all heads of its layer. So a
step costs one row of a small network a layer, however many entries move. What is written before the
first eviction is not corrected: until then the model is unchanged.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners.base import Aligner, AlignerConfig, Birth, Flags, Move
from kvalign.aligners.entries import KV
from kvalign.foundation.errors import UserError

if TYPE_CHECKING:
    from kvalign.cache.sizes import CacheSizes

TABLES = ("key", "value", "key_scale", "value_scale")


class Tables(NamedTuple):
    """Means [H, P, D] and scales [H, P] of a layer's entries at P positions."""

    key_means: Tensor
    value_means: Tensor
    key_scales: Tensor
    value_scales: Tensor

    def first(self, num: int) -> "Tables":
        """Tables of the first positions alone."""
        return Tables(*(x[:, :num] for x in self))

    def of_entries(self, places: Tensor, num_sinks: int) -> "Tables":
        """Same means, and the scales of the entries behind the sinks, which lie at places [B or 1,
        T, S] (negative: anywhere): [B or 1, H, 1, T, S - num_sinks].
        """
        at = places[..., num_sinks:].clamp_min(0).to(self.key_scales.device)
        scales = (x[:, at].transpose(0, 1)[:, :, None] for x in self[2:])
        return Tables(*self[:2], *scales)


class TableAligner(Aligner):
    """Means [L, H, P, D] and scales [L, H, P], P = chunk_len; before training 0 and 1."""

    kind = "table"
    recursive = False
    corrects: ClassVar[bool] = False
    """Whether new entries are corrected once something was evicted (`network_of`)."""

    def __init__(self, config: AlignerConfig):
        super().__init__(config)
        shape = (config.num_layers, config.num_kv_heads, config.chunk_len, config.head_dim)
        means = torch.zeros(shape, dtype=torch.float32)
        scales = torch.ones(shape[:-1], dtype=torch.float32)
        self.key, self.value = nn.Parameter(means), nn.Parameter(means.clone())
        self.key_scale, self.value_scale = nn.Parameter(scales), nn.Parameter(scales.clone())

    def anchor(self, layer: int, entries: KV, birth: Birth, evicting: Flags = False) -> KV:
        assert not isinstance(birth, slice) or birth.stop <= self.key.shape[2]
        # A slice is a view: for the one token of a step that is most of the cost.
        means = self.key[layer, :, birth], self.value[layer, :, birth]
        scales = self.key_scale[layer, :, birth], self.value_scale[layer, :, birth]
        return standardised(*entries, Tables(*means, *scales))

    def network_of(self, layer: int) -> Sequence[Tensor] | None:
        """Weights of the network that corrects new entries of a layer once something was evicted,
        as `kernel.attend` takes them; empty: nothing does. None: they do not fit there.
        """
        return ()

    def squeezed(self, cache_size: int, *, later: bool) -> tuple[Self, Tensor | None]:
        """Tables by places of such a cache, and the positions [P] int64 of these; None: places.

        Args:
            later: whether places are squeezed when something is evicted; then squeezed ones lie
                behind the others, at chunk_len and on.
        """
        last = self.config.position_at(cache_size)
        if cache_size <= last:
            return self, None
        places = torch.arange(self.config.chunk_len, device=self.key.device)
        positions = (places * (last / cache_size)).round().long()
        if later:
            positions = torch.cat([places, positions])
        other = copy.copy(self)
        other._parameters = dict(self._parameters)
        for name in TABLES:
            x: Tensor = getattr(self, name)
            setattr(other, name, nn.Parameter(x[:, :, positions], False))
        return other, positions

    def realign(self, layer: int, entries: KV, move: Move) -> KV:
        keys, values = entries
        heads: slice | Tensor = slice(None)
        now: slice | Tensor = slice(move.first, move.first + keys.shape[2])
        if move.now.dim() > 1:  # each head its own places
            heads, now = torch.arange(keys.shape[1], device=keys.device)[:, None], move.now
        at = layer, heads, now
        return KV(
            torch.addcmul(self.key[at], keys, self.key_scale[at][..., None]),
            torch.addcmul(self.value[at], values, self.value_scale[at][..., None]),
        )


def version_of(aligner: TableAligner) -> tuple[tuple[int, int], ...]:
    """Return where each table lies, and how often it was changed there; a tensor of inference mode
    counts no changes.
    """
    tables: list[Tensor] = [getattr(aligner, name) for name in TABLES]
    return tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tables)


def standardised(keys: Tensor, values: Tensor, tables: Tables) -> KV:
    """Entries [B, H, S, D] without the means and scales of their S positions."""
    return KV(
        (keys - tables.key_means) / tables.key_scales[..., None],
        (values - tables.value_means) / tables.value_scales[..., None],
    )


class EntryNetwork(nn.Module):
    """Corrections of the keys and values of all heads of a layer, with one hidden ReLU layer."""

    def __init__(self, num_numbers: int, num_hidden: int):
        super().__init__()
        dtype = torch.float32  # whatever the process has as its default
        self.hidden = nn.Linear(2 * num_numbers, num_hidden, dtype=dtype)
        self.key, self.value = (nn.Linear(num_hidden, num_numbers, dtype=dtype) for _ in range(2))
        self.clear()

    def clear(self) -> None:
        """Reset the outputs to 0, as before training."""
        for output in (self.key, self.value):
            nn.init.zeros_(output.weight)
            nn.init.zeros_(output.bias)

    def forward(self, entries: KV) -> KV:
        """Corrections of entries [B, H, S, D]."""
        hidden = self.hidden(torch.cat(entries, 1).transpose(1, 2).flatten(2)).relu()
        shape = -1, entries.keys.shape[3]
        outputs = self.key(hidden), self.value(hidden)
        return KV(*(x.unflatten(2, shape).transpose(1, 2) for x in outputs))


class TableNetworkAligner(TableAligner):
    """Tables, and an `EntryNetwork` for each layer."""

    kind = "table-network"
    corrects = True
    default_sizes: ClassVar[Mapping[str, int]] = {"hidden": 64}

    def __init__(self, config: AlignerConfig):
        super().__init__(config)
        num_numbers = config.num_kv_heads * config.head_dim
        self.network = nn.ModuleList(
            EntryNetwork(num_numbers, config.sizes["hidden"]) for _ in range(config.num_layers)
        )

    def check(self, model: PreTrainedModel, sizes: "CacheSizes") -> None:
        if self.config.family != "learned":
            raise UserError(f"{self.kind} is for learned positions, not {self.config.family} ones")
        super().check(model, sizes)

    def network_of(self, layer: int) -> Sequence[Tensor] | None:
        if self.config.sizes["hidden"] % 16 or self.config.head_dim % 16:
            return None
        network: Any = self.network[layer]
        layers = network.hidden, network.key, network.value
        return [x for one in layers for x in (one.weight, one.bias)]

    def anchor(self, layer: int, entries: KV, birth: Birth, evicting: Flags = False) -> KV:
        x = super().anchor(layer, entries, birth)
        if evicting is False:
            return x
        change: KV = self.network[layer](x)
        if isinstance(evicting, Tensor):
            mask = evicting.to(x.keys.device)[:, None, :, None]
            change = change.map(lambda y: y * mask)
        return KV(x.keys + change.keys, x.values + change.values)
