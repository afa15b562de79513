"""Keys of sinks as they were computed, from which they are rotated to follow the window."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvalign.cache.ring import Part
from kvalign.cache.step import Step
from kvalign.foundation.autograd import no_autograd_modes


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
