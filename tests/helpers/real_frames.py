"""What the real cache and the real methods hold after each token: what the lane view must show."""

import functools
from itertools import pairwise
from types import SimpleNamespace

import torch

from helpers.tiny_models import tiny_model
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods import make_method
from kvalign.methods.cached import Cached
from kvalign.models.architectures import ModelSpec

NUM_TOKENS = 40
ANY = ModelSpec("any", "any", "learned", 1, 1, 1, None)


class Encoder:
    """A stand-in for the model: notes what it is run on, and at which positions."""

    device = torch.device("cpu")
    dtype = torch.float32
    config = SimpleNamespace(model_type="gpt2", vocab_size=NUM_TOKENS + 1)

    def __init__(self):
        self.entries, self.cache, self.encoded = [], None, 0

    def __call__(self, input_ids, past_key_values=None, **_):
        if past_key_values is None or past_key_values is not self.cache:
            self.entries, self.cache = [], past_key_values
        for token in input_ids[0].tolist():
            self.entries.append([token, len(self.entries)])
        self.encoded = input_ids.shape[1]
        if past_key_values is not None:
            past_key_values.update(*2 * [torch.zeros(1, 1, self.encoded, 1)], 0)
        return SimpleNamespace(logits=torch.zeros(1, 1, 2))


def placed(entries):
    return [[index, born, now] for now, (index, born) in enumerate(entries)]


def frames_of_cached(sizes):
    """What the cache of a method has in its slots, by `StreamingCache` alone."""
    cache, frames = StreamingCache(ANY, sizes), []

    def entries():
        tokens = cache.index()
        births = sizes.num_stored(tokens)  # what there was before it
        return list(zip(tokens.tolist(), births.tolist(), strict=True))

    for token in range(NUM_TOKENS):
        seen = [*entries(), (token, cache.num_stored)]
        cache.update(*2 * [torch.zeros(1, 1, 1, 1)], 0)
        stored = entries()
        assert len(stored) == cache.num_stored
        frames.append([placed(seen), placed(stored), 1])
    return frames


def frames_of_fed(method):
    """What a method runs its model on; what it stores is what the next token joins."""
    method.model = encoder = Encoder()
    seen = []
    for token in range(NUM_TOKENS + 1):
        try:
            method.feed(torch.tensor([[token]]))
        except ValueError:
            assert method.tokens_left == 0  # dense, at the context length
            seen.append(None)
            break
        seen.append(([*encoder.entries], encoder.encoded))
    frames = []
    for (now, encoded), after in pairwise(seen):
        stored = now if after is None else after[0][:-1]
        frames.append([placed(now), placed(stored), encoded])
    return frames


@functools.cache
def gpt2(context_len):
    return tiny_model("gpt2", n_positions=context_len, n_layer=1)


def real_frames(name, cache_size, num_sinks, num_evicted):
    """[seen, stored, encoded] of each token by the real classes; an entry is [index, born, now]."""
    if name == "kvalign":
        return frames_of_cached(CacheSizes(cache_size, num_sinks, num_evicted))
    method = make_method(
        name,
        gpt2(cache_size + 1),
        cache_size=cache_size,
        num_sinks=num_sinks,
        num_evicted=num_evicted,
    )
    if isinstance(method, Cached):
        return frames_of_cached(method.sizes)
    return frames_of_fed(method)
