"""A stream with a memory written out anew, over a plain model of transformers: each layer and head
of keys keeps every entry there ever was, without its position, and each token scores all that it
has lost, one by one, takes the best, puts them where they belong, and attends.

The model is called with one token at a time and no cache: its attention is a function of our own in
transformers' registry. All is float64. Nothing of the cache is used but the numbers of a position
table.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AttentionInterface, PreTrainedModel

from helpers.plain_policies import plain_copy

CLOSE = 1e-4  # scores that float32 may order otherwise
TOLERANCE = 1e-4
RECENCY = {True: 0.5, False: 2.0}  # by age or by rank: what a score is worth less for each e-fold
ALIKE = 0.95  # cosine of keys, less what all have in common, from which they say the same
COMPARED = 2  # times as many as are taken back
_NAME = "plain_memory"


class PlainMemory:
    """One stream.

    Args:
        model: from `PlainMemory.copy`.
        sizes: a `CacheSizes`, read as numbers.
        table: means and scales by name, [L, H, P, D] and [L, H, P]; None: none.
        num_tokens: at most.
    """

    _now: "PlainMemory"  # whose step it is

    def __init__(
        self,
        model: PreTrainedModel,
        sizes,
        table: dict[str, Tensor] | None,
        num_tokens: int,
    ):
        self.model, self.sizes, config = model, sizes, model.config
        self.table = {name: x.double() for name, x in table.items()} if table else None
        rotary = getattr(model.base_model, "rotary_emb", None)
        self.inv_freq = None if rotary is None else rotary.inv_freq.double()
        self.by_age = (sizes.recall_places or ("rank" if rotary is None else "age")) == "age"
        self.layers = range(config.num_hidden_layers)
        if sizes.recall_layers is not None:  # single ones: "0,2"
            self.layers = [*map(int, sizes.recall_layers.split(","))]
        self.num_positions = config.max_position_embeddings
        self.in_sight = sizes.cache_size - sizes.num_sinks - sizes.num_recalled
        self.near = self.in_sight + 1  # from right before the window to the token
        # Where positions are looked up, those by age take up to half of what there are.
        spare = self.num_positions - 1 - sizes.cache_size
        later = min(self.num_positions // 2, spare) if rotary is None and self.by_age else 0
        self.last_place = sizes.cache_size + later
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_heads, num_tokens, head_dim)
        self.keys, self.values = torch.zeros(2, *shape).double()
        self.seen = self.num_swapped = 0

    @staticmethod
    def copy(model: PreTrainedModel) -> PreTrainedModel:
        """The same model in float64, whose attention is ours."""
        AttentionInterface.register(_NAME, _attention)
        return plain_copy(model, _NAME)

    def step(self, token: Tensor, expected: Tensor) -> Tensor:
        """Take one token [] in; logits [V].

        Where two entries score so nearly alike that float32 may take the other one, both are tried:
        the one is taken that gives what is expected.
        """
        self.swap, self.close = None, []
        logits = self._run(token)
        for one in list(self.close):
            if torch.allclose(logits, expected.double(), rtol=0, atol=TOLERANCE):
                break
            self.swap = one
            logits = self._run(token)
        self.num_swapped += self.swap is not None
        self.seen += 1
        return logits

    def _run(self, token: Tensor) -> Tensor:
        self.place = min(self.seen, self.last_place)
        PlainMemory._now = self
        at = torch.tensor([[self.place]])
        return self.model(input_ids=token.view(1, 1), position_ids=at, use_cache=False).logits[0, 0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scaled queries [H, G, D] of a token and its entry [H, D]: attention [H, G, D]."""
        if self.seen >= self.sizes.num_sinks:
            key = self._turned(key, -self.place)
            key, value = (
                self._standardised(layer, "key", key),
                self._standardised(layer, "value", value),
            )
        self.keys[layer, :, self.seen], self.values[layer, :, self.seen] = key, value
        return torch.stack([self._of_head(layer, head, q) for head, q in enumerate(query)])

    def _of_head(self, layer: int, head: int, query: Tensor) -> Tensor:
        now, num_sinks = self.seen, self.sizes.num_sinks
        sinks = list(range(min(num_sinks, now + 1)))
        if now <= self.sizes.cache_size:  # nothing is lost yet
            taken, aways = [], []
            window = list(range(num_sinks, now + 1))
        elif layer not in self.layers:
            taken, aways = [], []
            window = list(range(now - self.sizes.cache_size + num_sinks, now + 1))
        else:
            taken = self._best(layer, head, query)
            aways = self._aways([now - j for j in taken])
            window = list(range(now - self.in_sight, now + 1))
        aways = torch.tensor([*aways, *(now - j for j in window)], dtype=torch.int64)
        places = self.place - aways
        if self.inv_freq is not None:  # there any place is free, but a table is read by rank
            num_missing = self.sizes.num_recalled - len(taken) if taken else 0
            places = num_sinks + num_missing + torch.arange(len(aways))
        others = [*taken, *window]
        keys, values = (
            self._placed(layer, head, name, held[layer, head, others], places)
            for name, held in (("key", self.keys), ("value", self.values))
        )
        keys = torch.cat([self.keys[layer, head, sinks], self._turned(keys, self.place - aways)])
        values = torch.cat([self.values[layer, head, sinks], values])
        scores = query @ keys.T
        if not self.by_age:  # for want of a place that says how old they are
            for i, j in enumerate(taken, start=len(sinks)):
                share = self.sizes.cache_size / (now - j)
                scores[:, i] += math.log(min(1, max(0.5, share)))
        return scores.softmax(-1) @ values

    def _best(self, layer: int, head: int, query: Tensor) -> list[int]:
        """The tokens that are taken back, in the order of time: of the best twice as many, those
        that no newer one of them says again.
        """
        sizes, now = self.sizes, self.seen
        lost = range(max(sizes.num_sinks, now - self.in_sight - sizes.memory), now - self.in_sight)
        asked = self._turned(query, self.near - self.place)  # as if right before the window
        scores = (asked @ self.keys[layer, head, lost.start : lost.stop].T).amax(0)
        worth = {
            j: score - RECENCY[self.by_age] * math.log(now - j)
            for j, score in zip(lost, scores.tolist(), strict=True)
        }
        order = sorted(worth, key=worth.__getitem__, reverse=True)
        compared = sorted(self._first(order, worth, COMPARED * sizes.num_recalled, (layer, head)))
        keys = self.keys[layer, head, compared]
        apart = keys - keys.mean(0)
        alike = cosine_similarity(apart[:, None], apart[None], dim=-1) > ALIKE
        again = {j for i, j in enumerate(compared) if alike[i, i + 1 :].any()}
        order = [j for j in order if j in compared and j not in again]
        return sorted(self._first(order, worth, sizes.num_recalled, (layer, head, "taken")))

    def _first(
        self, order: list[int], worth: dict[int, float], num: int, which: tuple[int | str, ...]
    ) -> list[int]:
        """The first of them, or those with the next in place of the last, where these are close."""
        if len(order) > num and abs(worth[order[num - 1]] - worth[order[num]]) < CLOSE:
            self.close.append(which)
            if self.swap == which:
                return [*order[: num - 1], order[num]]
        return order[:num]

    def _aways(self, ages: list[int]) -> list[int]:
        """How far before the token entries of these ages, the oldest first, lie.

        By rank side by side; by age at the logarithm of it, where neighbours keep as far apart as
        they were, or as half of the room allows.
        """
        num, near = self.sizes.num_recalled, self.near
        if not self.by_age:
            return [near + i for i in reversed(range(len(ages)))]
        room = self.last_place - near - self.sizes.num_sinks
        if self.inv_freq is not None:
            room = self.num_positions - 1 - near
        knee = max(1, self.num_positions // 8)
        beyond, older = [], None
        for age in reversed(ages):
            far = knee * math.log1p(max(age - near, 0) / knee)
            if older is not None:
                gap = max(age - near, 0) - max(older - near, 0)
                before = knee * math.log1p(max(older - near, 0) / knee)
                far = beyond[-1] + max(far - before, min(gap, max(1, room // (2 * num))))
            beyond.append(far)
            older = age
        return [near + min(round(x), room) for x in reversed(beyond)]

    def _standardised(self, layer: int, name: str, x: Tensor) -> Tensor:
        if self.table is None:
            return x
        mean, scale = self.table[name], self.table[f"{name}_scale"]
        return (x - mean[layer, :, self.place]) / scale[layer, :, self.place, None]

    def _placed(self, layer: int, head: int, name: str, x: Tensor, places: Tensor) -> Tensor:
        if self.table is None:
            return x
        mean, scale = self.table[name], self.table[f"{name}_scale"]
        return mean[layer, head, places] + scale[layer, head, places, None] * x

    def _turned(self, x: Tensor, by: int | Tensor) -> Tensor:
        """What is rotary, moved by so many positions away from the start."""
        if self.inv_freq is None:
            return x
        angles = torch.as_tensor(by)[..., None] * self.inv_freq
        num = len(self.inv_freq)
        first, second, rest = x[..., :num], x[..., num : 2 * num], x[..., 2 * num :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What transformers calls, with [1, H, 1, D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query = (query[0, :, 0] * scale).unflatten(0, (key.shape[1], -1))
    found = PlainMemory._now.attend(module.layer_idx, query, key[0, :, 0], value[0, :, 0])
    return found.flatten(0, 1)[None, None], None
