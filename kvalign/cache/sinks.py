"""Sinks: the first entries of each row, which are never evicted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvalign.cache.ring import KV, Part, cat
from kvalign.cache.form import Form
from kvalign.cache.step import Step
from kvalign.foundation.lasting import lasting


class Sinks(Part):
    """Keys and values in their original form, stacked over all layers, so that one rotation makes
    them follow the window.

    Attributes:
        held: by device, as they are stored: [L, B, H, num_sinks, width of the form]; a layer's
            sinks are on its device.
    """

    def __init__(self, num_layers: int, num_sinks: int):
        self.num_layers, self.num_sinks = num_layers, num_sinks
        self.held: dict[torch.device, KV] = {}

    @lasting()
    def make(self, like: KV, form: Form) -> None:
        """Allocate the sinks of a layer whose entries [B, H, ?, D] are like these."""
        num_layers, num_sinks = self.num_layers, self.num_sinks
        if like.keys.device not in self.held:
            one = like.map(lambda x: form.empty(x, num_sinks))
            self.held[like.keys.device] = one.map(lambda x: x.new_zeros(num_layers, *x.shape))

    def of(self, layer: int, device: torch.device) -> KV:
        """Sinks of a layer, as they are stored."""
        return self.held[device].map(lambda x: x[layer])

    def add(self, layer: int, step: Step, new: KV, form: Form) -> None:
        """Add the sinks among new entries [B, H, T, D] of a layer."""
        if min(step.seen) >= self.num_sinks:
            return
        own = self.of(layer, new.keys.device)
        for row, seen in enumerate(step.seen):
            num = min(step.num_new, self.num_sinks - seen)
            if num <= 0:
                continue
            first = new.rows(slice(row, row + 1)).slots(0, num)
            kept = form.stored_at(*first.map(Tensor.detach), slice(seen, seen + num))
            for sinks, x in zip(own, kept, strict=True):
                sinks[row, :, seen : seen + num] = x[0]

    @lasting()
    def select(self, rows: Tensor) -> None:
        for device, held in self.held.items():
            self.held[device] = held.map(lambda x: x[:, rows.to(x.device)])

    @lasting()
    def join(self, others: Sequence["Sinks"]) -> None:
        devices = others[0].held
        self.held = {device: cat((x.held[device] for x in others), dim=1) for device in devices}
