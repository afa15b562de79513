"""kvpress' StreamingLLMPress while decoding, put to the invariants of `kvalign verify`.

    python tests/scripts/verify_kvpress.py [llama-mini]

kvpress asks for a transformers before 5.3 and KV-Align for 5.4 or later, so it takes an environment
of its own: pip install kvpress, then KV-Align without its dependencies, and what is missing.
"""

import sys

import torch
from kvpress import DecodingPress, StreamingLLMPress
from transformers import DynamicCache

import kvalign
from kvalign.app.commands.verify import show

TARGET, EVERY, NUM_SINKS = 64, 16, 4


class PressedCache(DynamicCache):
    """A cache with a press of its own: once in `EVERY` steps it keeps `TARGET` entries."""

    def __init__(self):
        super().__init__()
        press = StreamingLLMPress(n_sink=NUM_SINKS)
        self.press = DecodingPress(press, compression_interval=EVERY, target_size=TARGET)

    def get_mask_sizes(self, query_length, layer_idx):
        """Before 5.4, transformers asks with the positions in place of their number."""
        if isinstance(query_length, int):
            query_length = torch.arange(query_length)
        return super().get_mask_sizes(query_length, layer_idx)


def make(model):
    """A cache; the model's attention hands each cache to its press, as `with press(model)` does."""
    for layer in model.model.layers:
        if not layer.self_attn._forward_hooks:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            layer.self_attn.register_forward_hook(_hook, with_kwargs=True)
    return PressedCache()


def _hook(module, args, kwargs, output):
    cache = kwargs.get("past_key_values")
    if isinstance(cache, PressedCache):
        return cache.press.forward_hook(module, args, kwargs, output)
    return output


if __name__ == "__main__":
    loaded = kvalign.load_model(*(sys.argv[1:] or ["llama-mini"]))
    show(kvalign.verify(loaded.model, make))
