"""Frames of a cache at work: what each token finds, recorded from the cache and the methods."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.memory.recall import QueryBatch
from kvalign.memory.recall_places import RecallPlaces
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.cached import Cached
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import ModelSpec

NUM_TOKENS = 60
_ANY = ModelSpec("this page", "any", "learned", 1, 1, 1, None)

Entry = list[int]
"""The token of an entry, the position at which it was encoded, its position now; and 1 if it was
encoded again.
"""
Frame = dict[str, Any]
"""`seen`, the entries that a token attends to, itself the last of them; `stored`, those that stay;
`encoded`, the number of tokens that the model ran on. Of a cache `held`, the token in each slot. Of
a memory `lost`, the tokens in it, and `back`, those that were taken back.
"""


def record(name: str, sizes: CacheSizes) -> list[Frame]:
    """A frame for each token of a stream; fewer if it ends at the context length."""
    if sizes.memory:
        return [_of_memory(sizes, token) for token in range(NUM_TOKENS)]
    if issubclass(METHODS[name], Cached):
        return _of_cache(sizes)
    config = GPT2Config(
        vocab_size=NUM_TOKENS + 1,
        n_positions=sizes.cache_size + 1,
        n_embd=2,
        n_layer=1,
        n_head=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    fixed = METHODS[name].fixed
    own = {x: getattr(sizes, x) for x in ("num_sinks", "num_evicted") if x not in fixed}
    model = GPT2LMHeadModel(config).eval()
    method = make_method(name, model, cache_size=sizes.cache_size, warn=False, **own)
    return _of_method(method)


def _of_cache(sizes: CacheSizes) -> list[Frame]:
    cache, frames = StreamingCache(_ANY, sizes), []

    def entries() -> list[Entry]:
        tokens = enumerate(cache.index().tolist())
        return [[token, sizes.num_stored(token), now] for now, token in tokens]

    for token in range(NUM_TOKENS):
        num = cache.num_stored
        seen = [*entries(), [token, num, num]]
        cache.update(*2 * [torch.full((1, 1, 1, 1), float(token))], 0)
        held = cache.layers[0].entries.data.keys[0, 0, :, 0]
        slots = held[: min(token, sizes.cache_size) + 1].int().tolist()
        frames.append({"seen": seen, "stored": entries(), "encoded": 1, "held": slots})
    return frames


class _Encoder:
    """A stand-in for a model: notes the tokens that it is run on, and at which positions."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any):
        self.config, self.cache, self.encoded = config, None, 0
        self.entries: list[Entry] = []
        self._known = set[int]()

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        if past_key_values is None or past_key_values is not self.cache:
            self.entries, self.cache = [], past_key_values
        for token in input_ids[0].tolist():
            place = len(self.entries)
            again = [1] if token in self._known else []
            self.entries.append([token, place, place, *again])
            self._known.add(token)
        self.encoded = input_ids.shape[1]
        if past_key_values is not None:
            past_key_values.update(*2 * [torch.zeros(1, 1, self.encoded, 1)], 0)
        return SimpleNamespace(logits=torch.zeros(1, 1, 2))


def _of_method(method: Method) -> list[Frame]:
    """Frames of what a method runs its model on; it stores what the next token joins."""
    encoder: Any = _Encoder(method.model.config)
    method.model, frames = encoder, list[Frame]()
    for token in range(NUM_TOKENS + 1):
        try:
            method.feed(torch.tensor([[token]]))
        except UserError:  # at the context length
            return frames
        if frames:
            frames[-1]["stored"] = encoder.entries[:-1]
        seen = [*encoder.entries]
        frames.append({"seen": seen, "stored": seen, "encoded": encoder.encoded})
    return frames[:-1]


def _of_memory(sizes: CacheSizes, token: int) -> Frame:
    """Frame of a cache with a memory. Chance says which entries come back, and newer ones are
    likelier: there is no model here whose queries choose them.
    """
    num_sinks, size, in_sight = sizes.num_sinks, sizes.cache_size, sizes.num_in_sight
    places = RecallPlaces(sizes, 10**9, by_age=True, is_free=True)
    asking = QueryBatch(places, torch.tensor([[token]]), torch.tensor([token + 1]))
    slots = asking.evicted_slots(num_slots=NUM_TOKENS + 1)
    tokens = token - slots.ages(torch.arange(NUM_TOKENS + 1))
    lost = sorted(tokens[slots.worth.isfinite()].tolist())
    chance = random.Random(token)
    drawn = sorted(lost, key=lambda one: chance.random() ** (token - one))
    back = sorted(drawn[-(sizes.num_recalled or 0) :])
    window = range(token - in_sight, token) if lost else range(num_sinks, token)

    def placed(indices: list[int], first: int = 0) -> list[Entry]:
        return [[x, min(x, size), now] for now, x in enumerate(indices, first)]

    seen = placed([*range(min(num_sinks, token)), *back, *window, token])
    stored = seen
    if token >= size:
        kept = placed([*range(token + 1 - in_sight, token + 1)], size - in_sight)
        stored = [*seen[:num_sinks], *kept]
    return {"seen": seen, "stored": stored, "encoded": 1, "lost": lost, "back": back}
