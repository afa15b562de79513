"""The paper's aligner (Aldea, Hwang, Kim, Liang 2024): one small residual network for keys and one
for values, shared by all layers and heads, applied at each eviction.

    out = x + f(x, position, layer, head)

It is trained on entries of a clean cache, but applied to its own output at each move. So errors
accumulate.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners.base import Aligner, AlignerConfig, Move
from kvalign.aligners.entries import KV
from kvalign.aligners.kinds import NETWORK_SIZES, SHARED_SIZES, TARGETS
from kvalign.foundation.errors import UserError

if TYPE_CHECKING:
    from kvalign.cache.sizes import CacheSizes

_HIDDEN = NETWORK_SIZES.keys() - SHARED_SIZES


class RealignNet(nn.Module):
    """x [..., D] -> x + MLP(x, position, layer, head), two hidden ReLU layers.

    The first layer acts on a concatenation. So it is a product for the vector, plus one table row
    for each embedding. The tables are small, and computed once for each call instead of once for
    each row.
    """

    def __init__(
        self,
        head_dim: int,
        num_positions: int,
        num_layers: int,
        num_heads: int,
        *,
        hidden1: int,
        hidden2: int,
        position_dim: int = NETWORK_SIZES["position_dim"],
        layer_dim: int = NETWORK_SIZES["layer_dim"],
        head_embed_dim: int = NETWORK_SIZES["head_embed_dim"],
    ):
        super().__init__()
        dtype = torch.float32  # whatever the process has as its default
        self.position = nn.Embedding(num_positions, position_dim, dtype=dtype)
        self.layer = nn.Embedding(num_layers, layer_dim, dtype=dtype)
        self.head = nn.Embedding(num_heads, head_embed_dim, dtype=dtype)
        self.fc1 = nn.Linear(
            head_dim + position_dim + layer_dim + head_embed_dim, hidden1, dtype=dtype
        )
        self.fc2 = nn.Linear(hidden1, hidden2, dtype=dtype)
        self.fc3 = nn.Linear(hidden2, head_dim, dtype=dtype)
        self.splits = [head_dim, position_dim, layer_dim, head_embed_dim]
        self.clear()

    def clear(self) -> None:
        """Reset the network so that its output equals its input, as before training."""
        nn.init.zeros_(self.fc3.weight)
        nn.init.zeros_(self.fc3.bias)

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight of the vector [hidden1, D]; parts of position, layer, head: [P|L|H, hidden1]."""
        vector, position, layer, head = self.fc1.weight.split(self.splits, dim=1)
        return (
            vector,
            self.position.weight @ position.T + self.fc1.bias,
            self.layer.weight @ layer.T,
            self.head.weight @ head.T,
        )

    def forward(self, x: Tensor, position: Tensor, layer: Tensor, head: Tensor) -> Tensor:
        """Realigned rows of x [N, D], each with its position after the sinks, layer and head: [N]
        int64.

        Layer and head share one table, and the tables' rows go into the product as its bias: on a
        CPU, the gradient of a lookup and each pass over [N, hidden1] cost as much as a good part of
        the products.
        """
        vector, positions, layers, heads = self.tables()
        of_layer = (layers[:, None] + heads).flatten(0, 1)  # [L * H, hidden1]
        place = nn.functional.embedding(position, positions)
        place = place + nn.functional.embedding(layer * len(heads) + head, of_layer)  # [N, hidden1]
        return x + self._rest(torch.addmm(place, x, vector.T))

    def correction(self, x: Tensor, layer: int, first: int = 0) -> Tensor:
        """Correction of one layer's entries x [B, H, S, D], at positions `first` and on."""
        vector, positions, layers, heads = self.tables()
        of_position = positions[first : first + x.shape[2]]
        place = (heads + layers[layer])[:, None] + of_position  # [H, S, hidden1]
        return self._rest(nn.functional.linear(x, vector) + place)

    def _rest(self, hidden: Tensor) -> Tensor:
        """Correction from the first layer's output [..., hidden1], which is overwritten."""
        return self.fc3(self.fc2(hidden.relu_()).relu_())


class NetworkAligner(Aligner):
    """Pair of `RealignNet`s. Sizes are settings `key_hidden1`, `key_hidden2`, `value_...`,
    `position_dim`, ...

    A network trained on shift s makes a longer move as several moves of s. Without training, keys
    or values stay unchanged.
    """

    kind = "network"
    recursive = True
    default_sizes = NETWORK_SIZES
    default_num_sinks = 4

    def __init__(self, config: AlignerConfig):
        super().__init__(config)
        self.key, self.value = (new_net(config, kv, config.num_positions) for kv in TARGETS)

    def check(self, model: PreTrainedModel, sizes: "CacheSizes") -> None:
        super().check(model, sizes)
        if sizes.num_sinks != self.config.num_sinks:
            raise UserError(
                f"num_sinks must be {self.config.num_sinks} with this aligner (its positions count "
                f"from there), got {sizes.num_sinks}"
            )
        shifts = self.config.shifts
        if all(sizes.move_size % shift for shift in shifts):
            trained = " or ".join(map(str, shifts))
            raise UserError(
                f"num_evicted or realign_every must be a multiple of {trained} with this aligner "
                f"(the shifts it was trained on), got {sizes.move_size}"
            )

    def realign(self, layer: int, entries: KV, move: Move) -> KV:
        keys, values = entries
        # check() saw to it that a trained shift divides num_evicted, and so every move.
        step = max(shift for shift in self.config.shifts if move.shift % shift == 0)
        last = move.first - self.config.num_sinks
        for first in reversed(range(last, last + move.shift, step)):
            keys = keys + self.key.correction(keys, layer, first)
            values = values + self.value.correction(values, layer, first)
        return KV(keys, values)


def new_net(config: AlignerConfig, kv: str, num_positions: int) -> RealignNet:
    shared = {name: size for name, size in config.sizes.items() if name not in _HIDDEN}
    hidden1, hidden2 = (config.sizes[f"{kv}_hidden{i}"] for i in (1, 2))
    shape = (config.head_dim, num_positions, config.num_layers, config.num_kv_heads)
    return RealignNet(*shape, hidden1=hidden1, hidden2=hidden2, **shared)
