"""Keys and values of a layer, each in a slot of its own.

    slots   0 1 2 3 | 4 5 6 7 8 9        C = 9, 4 sinks
    tokens  0 1 2 3 | 10 11 6 7 8 9      token 11 was written over token 5, token 10 over token 4

Sinks lie in the first slots. The window is a ring behind them: each new entry is written over the
one that is evicted. Nothing else is written, and a full cache is read as it lies, since attention
does not ask in which order. A cache that fills has only the slots that it has used.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.aligners.entries import KV
from kvalign.cache.form import Form
from kvalign.cache.step import Step
from kvalign.foundation.autograd import no_autograd_modes

_SHORTEST = 64


class Part(ABC):
    """Part of a cache that has rows of a batch."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'], in this order."""

    @abstractmethod
    def join(self, others: Sequence[Any]) -> None:
        """Take over the rows of all these parts of the same kind."""


class Ring:
    """Slots of a layer; the pass of its cache says which of them count.

    Args:
        like: entries of the shape [B, H, ?, D], on the device of those to store.
        most: number of slots of a full cache.
        form: of the stored entries.

    Attributes:
        data: all slots, as they are stored: [B, H, S, width of the form].
    """

    def __init__(self, like: KV, most: int, form: Form):
        self.most, self.form = most, form
        self.data = like.map(lambda x: form.empty(x, 0))

    @property
    def num_slots(self) -> int:
        return self.data.keys.shape[2]

    def like(self) -> KV:
        """No entries, of the shape and dtype of those that attention gets: [B, H, 0, D]."""
        return self.data.slots(0, 0).map(self.form.decode)

    def grow(self, num: int) -> None:
        """Have at least so many slots, or all that there may be."""
        if self.num_slots < min(num, self.most):
            self._lengthen(min(self.most, max(2 * num, _SHORTEST)))

    @no_autograd_modes()
    def _lengthen(self, num: int) -> None:
        missing = num - self.num_slots
        self.data = self.data.map(lambda x: pad(x, (0, 0, 0, missing)))

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.data = self.data.map(lambda x: x[rows.to(x.device)])

    @no_autograd_modes()
    def replace(self, stored: KV) -> None:
        """Have these slots only, given as they are stored, or before they are cast to that. They
        are the ring's own from now on.
        """
        stored = stored.map(lambda x: x.detach().to(self.data.keys.dtype))
        self.data = stored.map(lambda x: x.clone() if x.is_inference() else x)


class SinkKeys(Part):
    """Keys of the first entries, stacked over all layers, so that one rotation moves them.

    Attributes:
        by_device: [L, B, H, num_sinks, D]; a layer's keys are on its device.
    """

    def __init__(self, num_layers: int, num_sinks: int):
        self.num_layers, self.num_sinks = num_layers, num_sinks
        self.by_device: dict[torch.device, Tensor] = {}

    @no_autograd_modes()
    def make(self, like: Tensor) -> None:
        """Allocate the keys of layers like this one's [B, H, ?, D]."""
        if like.device not in self.by_device:
            one = like.new_zeros(*like.shape[:2], self.num_sinks, like.shape[3])
            self.by_device[like.device] = one.expand(self.num_layers, *one.shape).contiguous()

    def of(self, layer: int, device: torch.device) -> Tensor:
        """Keys of a layer, [B, H, num_sinks, D]."""
        return self.by_device[device][layer]

    def add(self, layer: int, step: Step, keys: Tensor) -> None:
        """Add those of the sinks among new keys [B, H, T, D] of a layer."""
        own = self.of(layer, keys.device)
        for row, seen in enumerate(step.seen):
            num = min(step.num_new, self.num_sinks - seen)
            if num > 0:
                own[row, :, seen : seen + num] = keys[row, :, :num].detach()

    def reset(self) -> None:
        self.by_device.clear()

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        for device, keys in self.by_device.items():
            self.by_device[device] = keys[:, rows.to(device)]

    @no_autograd_modes()
    def join(self, others: Sequence["SinkKeys"]) -> None:
        devices = others[0].by_device
        self.by_device = {x: torch.cat([one.by_device[x] for one in others], 1) for x in devices}
