"""A sink cache as it is often written, which rotates kept entries at each step, and DynamicCache of
a model with a sliding window: llama-mini as a Mistral. Both are tested with `kvalign verify`.

In this folder: kvalign verify --model llama-mini --cache other_caches:make
"""

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

import kvalign
from kvalign.app.commands.verify import show
from kvalign.models import rotation_of

CACHE_SIZE, NUM_SINKS = 64, 4


class SinkCache(DynamicCache):
    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        if (num_dropped := keys.shape[2] - CACHE_SIZE) > 0:
            first, held = NUM_SINKS + num_dropped, self.layers[layer_idx]
            turned = self.rotation.shift(keys[:, :, first:], num_dropped)
            held.keys = torch.cat([keys[:, :, :NUM_SINKS], turned], 2)
            held.values = torch.cat([values[:, :, :NUM_SINKS], values[:, :, first:]], 2)
        return keys, values


def make(model):
    cache = SinkCache()
    cache.rotation = rotation_of(model)
    return cache


if __name__ == "__main__":
    llama = kvalign.load_model("llama-mini").model
    show(kvalign.verify(llama, make, num_steps=1000))
    config = llama.config.to_dict() | {"model_type": "mistral", "sliding_window": 64}
    mistral = MistralForCausalLM(MistralConfig(**config)).eval()
    mistral.load_state_dict(llama.state_dict())
    show(kvalign.verify(mistral, lambda model: DynamicCache(config=model.config), num_steps=1000))
