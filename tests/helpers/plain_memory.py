"""A stream with a memory written out anew, over a plain model of transformers: each layer and head
of keys keeps every entry there ever was, without its position, and each token scores all that it
has lost, one by one, takes the best, puts them where they belong, and attends.

The model is called with one token at a time and no cache: its attention is a function of our own in
transformers' registry. All is float64, or of a half precision, which says how far from that any
honest loop is. Nothing of the cache is used but the numbers of a position table.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AttentionInterface, PreTrainedModel

from helpers.plain_stream import copy_of, in_8_bits, rotary_of, turning_of

CLOSE = 1e-4  # scores that float32 may order otherwise
RECENCY = {True: 0.5, False: 2.0}  # by age or by rank: what a score is worth less for each e-fold
ALIKE = {True: 0.95, False: 0.7}  # cosine of keys, less what all share, that say the same
COMPARED = {True: 2, False: 4}  # times as many as are taken back
FACTOR = 4  # times as far off as a loop of half precision is, figures may be
_NAME = "plain_memory"


class PlainMemory:
    """One stream.

    Args:
        model: from `PlainMemory.copy`.
        sizes: a `CacheSizes`, read as numbers.
        table: means and scales by name, [L, H, P, D] and [L, H, P]; None: none.
        num_tokens: at most.
        rounds: as of `Plan`.
    """

    _now: "PlainMemory"  # whose step it is
    taken: dict[int, list[list[int]]]  # what is followed
    rough: "PlainMemory | None" = None

    def __init__(
        self,
        model: PreTrainedModel,
        sizes,
        table: dict[str, Tensor] | None,
        num_tokens: int,
        rounds: dict[int, Tensor] | None = None,
    ):
        self.model, self.sizes, self.rounds, config = model, sizes, rounds, model.config
        self.dtype = torch.promote_types(model.dtype, torch.float32)  # of what is not the model's
        self.table = {name: x.to(self.dtype) for name, x in table.items()} if table else None
        rotary = rotary_of(model)
        self.is_rotary, (self._turned, *_) = rotary is not None, turning_of(model, self.dtype)
        self.by_age = (sizes.recall_places or ("age" if rotary else "rank")) == "age"
        self.layers = dict.fromkeys(range(config.num_hidden_layers), 0.0)
        if sizes.recall_layers is not None:  # single ones: "0:-1.5,2"
            parts = (x.partition(":") for x in sizes.recall_layers.split(","))
            self.layers = {int(layer): float(loudness or 0) for layer, _, loudness in parts}
        self.num_positions = config.max_position_embeddings
        self.in_sight = sizes.cache_size - sizes.num_sinks - sizes.num_recalled
        self.near = self.in_sight + 1  # from right before the window to the token
        # Where positions are looked up, those by age take up to half of what there are.
        spare = self.num_positions - 1 - sizes.cache_size
        room = min(16 * sizes.num_recalled, self.num_positions // 2, spare)
        later = room if rotary is None and self.by_age else 0
        self.last_place = sizes.cache_size + later
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_heads, num_tokens, head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=model.dtype)
        self.seen = 0
        self.worth: dict[tuple[int, int], dict[int, float]] = {}  # of the last step, by head

    @staticmethod
    def copy(model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
        """The same model in float64 or another precision, whose attention is ours."""
        AttentionInterface.register(_NAME, _attention)
        return copy_of(model, dtype, _NAME)

    def follow(
        self, token: Tensor, taken: dict[int, list[list[int]]], rough: "PlainMemory | None"
    ) -> Tensor:
        """Take one token [] in, and back what another loop took, for each layer and head the tokens
        in the order of time: logits [V].

        `rough` has done so in half precision. AssertionError if figures that are as far off as its
        own, or in float32, do not allow what was taken.
        """
        self.taken, self.rough = taken, rough
        logits = self._run(token)
        self.seen += 1
        return logits

    def cut(self, first: int, stop: int) -> list[Tensor]:
        """Take out what lies from `first` on among sinks, memory and window. Return keys and values
        [L, H, S, D] of what stands behind `stop`, for `append`.
        """
        self._forget()
        behind = torch.arange(stop, self.seen)
        held = (x[:, :, stop : self.seen] for x in (self.keys, self.values))
        tails = self._bare(held, behind, behind < self.sizes.num_sinks)
        self.seen = first
        return tails

    def take_encoded(self, keys: Tensor, values: Tensor, births: Tensor) -> None:
        """Append entries [L, H, S, D] that were computed at these positions."""
        self.append(self._bare((keys, values), births, births >= 0))

    def _bare(self, held: Iterable[Tensor], births: Tensor, is_raw: Tensor) -> list[Tensor]:
        """Keys and values [L, H, S, D] in the form behind the sinks, of which these were not."""
        bare = []
        for name, x in zip(("key", "value"), held, strict=True):
            x = x.to(self.dtype, copy=True)
            for i in is_raw.nonzero().flatten().tolist():
                j = int(births[i])
                born = self._turned(x[:, :, i], -j) if name == "key" else x[:, :, i]
                for layer in range(len(x)):
                    x[layer, :, i] = self._standardised(layer, name, born[layer], j)
            bare.append(x)
        return bare

    def append(self, tails: list[Tensor]) -> None:
        """Put what `cut` returned behind what is there."""
        num, num_sinks = tails[0].shape[2], self.sizes.num_sinks
        rounded = [self._rounded(layer, *x) for layer, x in enumerate(zip(*tails, strict=True))]
        tails = [torch.stack(x) for x in zip(*rounded, strict=True)]
        for name, held, tail in zip(("key", "value"), (self.keys, self.values), tails, strict=True):
            for i, j in enumerate(range(self.seen, min(num_sinks, self.seen + num))):  # are now
                for layer in range(len(tail)):
                    for head in range(tail.shape[1]):
                        one = tail[layer, head, i : i + 1]
                        one = self._placed(layer, head, name, one, torch.tensor([j]))
                        one = self._turned(one, j) if name == "key" else one
                        tail[layer, head, i : i + 1] = one
            held[:, :, self.seen : self.seen + num] = tail.to(held.dtype)
        self.seen += num
        self._forget()

    def _forget(self) -> None:
        """Have no tokens that are lost for good."""
        num_sinks = self.sizes.num_sinks
        over = self.seen - num_sinks - self.in_sight - self.sizes.memory
        if over > 0:
            for held in (self.keys, self.values):
                kept = held[:, :, num_sinks + over : self.seen].clone()
                held[:, :, num_sinks : self.seen - over] = kept
            self.seen -= over

    def _run(self, token: Tensor) -> Tensor:
        self.place = min(self.seen, self.last_place)
        PlainMemory._now = self
        at = torch.tensor([[self.place]])
        return self.model(input_ids=token.view(1, 1), position_ids=at, use_cache=False).logits[0, 0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scaled queries [H, G, D] of a token and its entry [H, D]: attention [H, G, D]."""
        is_sink = self.seen < self.sizes.num_sinks
        key, value = self._turned(key.to(self.dtype), -self.place), value.to(self.dtype)
        if not is_sink:
            key, value = (
                self._standardised(layer, name, x) for name, x in (("key", key), ("value", value))
            )
        key, value = self._rounded(layer, key[:, None], value[:, None])
        key, value = key[:, 0], value[:, 0]
        key = self._turned(key, self.place) if is_sink else key
        self.keys[layer, :, self.seen], self.values[layer, :, self.seen] = key, value
        return torch.stack([self._of_head(layer, head, q) for head, q in enumerate(query)])

    def _rounded(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H, S, D] without position as they are stored."""
        if self.rounds is None:
            return key, value
        less = 0.0 if self.table or layer not in self.rounds else self.rounds[layer]
        return in_8_bits(key - less) + less, in_8_bits(value)

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
            taken = self._taken_back(layer, head, query)
            aways = self._aways([now - j for j in taken])
            window = list(range(now - self.in_sight, now + 1))
        aways = torch.tensor([*aways, *(now - j for j in window)], dtype=torch.int64)
        places = self.place - aways
        if self.is_rotary:  # there any place is free, but a table is read by rank
            num_missing = self.sizes.num_recalled - len(taken) if taken else 0
            places = num_sinks + num_missing + torch.arange(len(aways))
        others = [*taken, *window]
        keys, values = (
            self._placed(layer, head, name, held[layer, head, others].to(self.dtype), places)
            for name, held in (("key", self.keys), ("value", self.values))
        )
        keys, values = (
            torch.cat([held[layer, head, sinks], x.to(held.dtype)]).to(self.dtype)
            for held, x in (
                (self.keys, self._turned(keys, self.place - aways)),
                (self.values, values),
            )
        )
        scores = query.to(self.dtype) @ keys.T
        scores[:, len(sinks) : len(sinks) + len(taken)] += self.layers.get(layer, 0.0)
        if not self.by_age:  # for want of a place that says how old they are
            for i, j in enumerate(taken, start=len(sinks)):
                share = self.sizes.cache_size / (now - j)
                scores[:, i] += math.log(min(1, max(0.5, share)))
        return scores.softmax(-1) @ values

    def _taken_back(self, layer: int, head: int, query: Tensor) -> list[int]:
        """The tokens that are taken back, in the order of time."""
        sizes, now = self.sizes, self.seen
        lost = range(max(sizes.num_sinks, now - self.in_sight - sizes.memory), now - self.in_sight)
        asked = self._turned(
            query.to(self.dtype), self.near - self.place
        )  # right before the window
        keys = self.keys[layer, head, lost.start : lost.stop]
        scores = (asked.to(keys.dtype) @ keys.T).amax(0)
        worth = {
            j: score - RECENCY[self.by_age] * math.log(now - j)
            for j, score in zip(lost, scores.tolist(), strict=True)
        }
        self.worth[layer, head], taken = worth, self.taken[layer][head]
        if self.dtype == torch.float64 and self.rounds is None:
            self._check(layer, head, worth, taken)
        return taken

    def _said_again(self, layer: int, head: int, compared: list[int]) -> dict[int, float]:
        """By token the cosine of its key with the newer one that is most like it."""
        keys = self.keys[layer, head, compared].to(self.dtype)
        apart = keys - keys.mean(0)
        alike = cosine_similarity(apart[:, None], apart[None], dim=-1)
        newer = alike.masked_fill(torch.ones_like(alike).tril().bool(), -1.0).amax(1)
        return dict(zip(compared, newer.tolist(), strict=True))

    def _check(self, layer: int, head: int, worth: dict[int, float], taken: list[int]) -> None:
        """AssertionError if figures that are so far off do not allow what was taken."""
        num, where = self.sizes.num_recalled, f"layer {layer}, head {head}, token {self.seen}"
        assert taken == sorted(set(taken)) and worth.keys() >= set(taken), where
        off = _off(worth, self.rough and self.rough.worth[layer, head])
        most = COMPARED[self.by_age] * num
        sure, maybe = (
            {j for j in worth if sum(x > worth[j] + by for i, x in worth.items() if i != j) < most}
            for by in (-2 * off, 2 * off)
        )
        assert maybe >= set(taken), f"{where}: what was worth less was compared"
        if sure != maybe:  # others may have been compared, with which cosines are others
            return
        compared = sorted(sure)
        again = self._said_again(layer, head, compared)
        by = _off(again, self.rough and self.rough._said_again(layer, head, compared))
        most = ALIKE[self.by_age]
        assert all(again[j] <= most + by for j in taken), f"{where}: what is said again was taken"
        fine = [j for j in compared if again[j] <= most - by]
        assert len(taken) >= min(num, len(fine)), f"{where}: too few were taken"
        least = min((worth[j] for j in taken), default=math.inf)
        left = [j for j in fine if j not in taken and worth[j] > least + 2 * off]
        assert not left, f"{where}: what was worth more was left"

    def _aways(self, ages: list[int]) -> list[int]:
        """How far before the token entries of these ages, the oldest first, lie.

        By rank side by side; by age at the logarithm of it, where neighbours keep as far apart as
        they were, or by eight tokens, or as half of the room allows.
        """
        num, near = self.sizes.num_recalled, self.near
        if not self.by_age:
            return [near + i for i in reversed(range(len(ages)))]
        room = self.last_place - near - self.sizes.num_sinks
        if self.is_rotary:
            room = self.num_positions - 1 - near
        knee, most = max(1, self.num_positions // 32), min(8, max(1, room // (2 * num)))
        beyond, older = [], None
        for age in reversed(ages):
            far = knee * math.log1p(max(age - near, 0) / knee)
            if older is not None:
                gap = max(age - near, 0) - max(older - near, 0)
                before = knee * math.log1p(max(older - near, 0) / knee)
                far = beyond[-1] + max(far - before, min(gap, most))
            beyond.append(far)
            older = age
        return [near + min(round(x), room) for x in reversed(beyond)]

    def _standardised(self, layer: int, name: str, x: Tensor, place: int | None = None) -> Tensor:
        if self.table is None:
            return x
        at = self.place if place is None else place
        mean, scale = self.table[name], self.table[f"{name}_scale"]
        return (x - mean[layer, :, at]) / scale[layer, :, at, None]

    def _placed(self, layer: int, head: int, name: str, x: Tensor, places: Tensor) -> Tensor:
        if self.table is None:
            return x
        mean, scale = self.table[name], self.table[f"{name}_scale"]
        return mean[layer, head, places] + scale[layer, head, places, None] * x


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What transformers calls, with [1, H, 1, D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query = (query[0, :, 0] * scale).unflatten(0, (key.shape[1], -1))
    found = PlainMemory._now.attend(module.layer_idx, query, key[0, :, 0], value[0, :, 0])
    return found.flatten(0, 1)[None, None].to(query.dtype), None


def _off(figures: dict[int, float], rough: dict[int, float] | None) -> float:
    """How far off figures may be."""
    if rough is None:
        return CLOSE
    return FACTOR * max(abs(figures[j] - rough[j]) for j in figures) + CLOSE
