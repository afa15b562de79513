"""A sink cache as it is often written, tested with `kvalign verify`: after each step it rotates the
kept entries from their last positions to the new ones.

In this folder: kvalign verify --model llama-mini --cache sink_cache:make
"""

import torch
from transformers import DynamicCache

import kvalign
from kvalign.app.commands.verify import show
from kvalign.models import rotation_of

CACHE_SIZE, NUM_SINKS = 64, 4


class SinkCache(DynamicCache):
    def __init__(self, rotation):
        super().__init__()
        self.rotation = rotation

    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        if (num_dropped := keys.shape[2] - CACHE_SIZE) > 0:
            first, held = NUM_SINKS + num_dropped, self.layers[layer_idx]
            turned = self.rotation.shift(keys[:, :, first:], num_dropped)
            held.keys = torch.cat([keys[:, :, :NUM_SINKS], turned], 2)
            held.values = torch.cat([values[:, :, :NUM_SINKS], values[:, :, first:]], 2)
        return keys, values


def make(model):
    return SinkCache(rotation_of(model))


if __name__ == "__main__":
    show(kvalign.verify(kvalign.load_model("llama-mini").model, make, num_steps=1000))
