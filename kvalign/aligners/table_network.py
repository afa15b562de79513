"""Position tables, and a network that corrects an entry once: when it is written.

    x <- table.anchor(entry) + f(x)        then the table alone places x, wherever it goes

Once entries are evicted, new ones are written at the last position of a full cache. A table knows
what entries look like there on average; the network sees the entry, keys and values of all heads of
its layer. Its output is stored with the entry, so a step costs one row of a small network a layer,
however many entries move. What is written before the first eviction is not corrected: until then
the model is unchanged.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners.base import Birth, Flags
from kvalign.aligners.config import AlignerConfig
from kvalign.aligners.entries import KV
from kvalign.aligners.table import TableAligner
from kvalign.foundation.errors import UserError

if TYPE_CHECKING:
    from kvalign.cache.sizes import CacheSizes


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

    def anchor(self, layer: int, entries: KV, birth: Birth, evicting: Flags = False) -> KV:
        x = super().anchor(layer, entries, birth)
        if evicting is False:
            return x
        change: KV = self.network[layer](x)
        if isinstance(evicting, Tensor):
            mask = evicting.to(x.keys.device)[:, None, :, None]
            change = change.map(lambda y: y * mask)
        return KV(x.keys + change.keys, x.values + change.values)
