"""Eviction by policy written out anew, over a plain model of transformers: for each layer and head
a list of entries, each of which knows where it was born; a step stacks them where they lie now.

Nothing of the cache is used but the numbers of a position table. All is float64: near-equal scores
may be ordered otherwise in float32, so a caller can hand in the entries that another loop has kept
(`follow`); the scores of what it dropped are then held against those of what it should have.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

CLOSE = 1e-5  # scores that float32 may order otherwise


@dataclass
class Entry:
    """The key and value [D] of a token, as they were computed at its birth."""

    token: int
    birth: int
    key: Tensor
    value: Tensor
    drawn: float = 0.0


def plain_copy(model: PreTrainedModel, attention: str = "eager") -> PreTrainedModel:
    """The same model in float64, with attention that hands out its weights, or another."""
    config = type(model.config)(**model.config.to_dict())
    copy = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    copy.load_state_dict(model.state_dict())
    return copy.eval().double().requires_grad_(False)


class PlainLoop:
    """One stream.

    Args:
        model: from `plain_copy`.
        sizes: a `CacheSizes`, read as numbers.
        table: means and scales by name, [L, H, P, D] and [L, H, P]; None: none.
    """

    def __init__(self, model: PreTrainedModel, sizes, table: dict[str, Tensor] | None = None):
        self.model, self.sizes = model, sizes
        self.table = {name: x.double() for name, x in table.items()} if table else None
        rotary = getattr(model.base_model, "rotary_emb", None)
        self.inv_freq = None if rotary is None else rotary.inv_freq.double()
        config = model.config
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.lists = [[[] for _ in range(num_heads)] for _ in range(config.num_hidden_layers)]
        self.seen = self.num_swapped = self.num_dropped = 0

    def step(self, token: Tensor) -> Tensor:
        """Take one token [] in; logits [V]. Entries go afterwards, with `evict`."""
        stored, keeps = len(self.lists[0][0]), self.sizes.positions == "keep"
        position = self.seen if keeps else stored
        placed = [self._stacked(layer) for layer in range(len(self.lists))]
        cache = DynamicCache(placed) if stored else DynamicCache()
        out = self.model(
            token.view(1, 1),
            past_key_values=cache,
            position_ids=torch.tensor([[position]]),
            output_attentions=True,
        )
        self.found = [(layer.keys[0], layer.values[0]) for layer in cache.layers]  # [H, S, D]
        self.weights = [weights[0, :, 0] for weights in out.attentions]  # [queries' heads, S]
        for heads, (keys, values) in zip(self.lists, self.found, strict=True):
            for head, key, value in zip(heads, keys, values, strict=True):
                head.append(Entry(self.seen, position, key[-1], value[-1]))
        self.seen += 1
        self._draw()
        return out.logits[0, -1]

    def _stacked(self, layer: int) -> tuple[Tensor, Tensor]:
        heads = [
            [self._placed(layer, head, rank, entry) for rank, entry in enumerate(entries)]
            for head, entries in enumerate(self.lists[layer])
        ]
        if not heads[0]:
            return torch.empty(0), torch.empty(0)
        keys, values = (
            torch.stack([torch.stack([e[i] for e in h]) for h in heads]) for i in (0, 1)
        )
        return keys[None], values[None]

    def _placed(self, layer: int, head: int, rank: int, entry: Entry) -> tuple[Tensor, Tensor]:
        key, value = entry.key, entry.value
        if entry.token < self.sizes.num_sinks or self.sizes.positions == "keep":
            return key, value
        key = self._turned(key, -entry.birth)
        if self.table is not None:
            key, value = (
                self.table[name][layer, head, rank]
                + self.table[f"{name}_scale"][layer, head, rank]
                * (x - self.table[name][layer, head, entry.birth])
                / self.table[f"{name}_scale"][layer, head, entry.birth]
                for name, x in (("key", key), ("value", value))
            )
        return self._turned(key, rank), value

    def _turned(self, key: Tensor, by: int) -> Tensor:
        if self.inv_freq is None:
            return key
        angles = torch.cat([self.inv_freq, self.inv_freq]) * by
        first, second = key.chunk(2)
        return key * angles.cos() + torch.cat([-second, first]) * angles.sin()

    def _draw(self) -> None:
        """Half of what an entry has drawn counts after C / 16 steps; queries that share a head of
        keys count as their mean.
        """
        decay = 0.5 ** (16 / self.sizes.cache_size)
        for heads, weights in zip(self.lists, self.weights, strict=True):
            for entries, drawn in zip(heads, self._by_head(weights, len(heads)), strict=True):
                for entry, w in zip(entries, drawn.tolist(), strict=True):
                    entry.drawn = entry.drawn * decay + w

    @staticmethod
    def _by_head(weights: Tensor, num_heads: int) -> Tensor:
        return weights.unflatten(0, (num_heads, -1)).mean(1)

    def scores(self, layer: int) -> Tensor:
        """What the entries of a layer are worth after a step: [H, S]."""
        keys, policy = self.found[layer][0], self.sizes.policy
        num_heads, num = keys.shape[:2]
        if policy == "oldest":
            return torch.arange(num).expand(num_heads, num).double()
        if policy == "random":
            generator = torch.Generator().manual_seed(self.seen * 4096 + layer)
            return torch.rand(num_heads, num, generator=generator).double()
        if policy == "key-norm":
            return -keys.pow(2).sum(-1).sqrt().half().double()  # to 11 bits
        if policy == "keydiff":
            unit = keys / keys.norm(dim=-1, keepdim=True)
            mean = unit.mean(1, keepdim=True)
            return -(unit * mean / mean.norm(dim=-1, keepdim=True)).sum(-1)
        if policy == "tova":
            return self.weights[layer].mean(0).expand(num_heads, num)
        drawn = torch.tensor([[e.drawn for e in h] for h in self.lists[layer]]).double()
        if policy == "second-chance":
            is_used = drawn >= 0.3 * drawn.mean(-1, keepdim=True)
            return torch.where(is_used, num, 0) + torch.arange(num).double()
        return drawn

    def evict(self, follow: Tensor | None = None) -> None:
        """Drop what is worth the least, if the cache is too full. With `follow` [L, H, S] that
        dropped other tokens: those, if their scores are as low.
        """
        if len(self.lists[0][0]) <= self.sizes.cache_size:
            return
        num, first_recent = self.sizes.num_evicted, self.seen - self.sizes.num_recent
        for layer, heads in enumerate(self.lists):
            for head, (entries, worth) in enumerate(
                zip(heads, self.scores(layer).tolist(), strict=True)
            ):
                order = sorted(range(len(entries)), key=lambda i: worth[i])  # of equal ones, older
                may = range(self.sizes.num_sinks, first_recent)
                lowest = [i for i in order if entries[i].token in may][:num]
                gone = lowest
                if follow is not None:
                    kept = set(follow[layer, head].tolist())
                    gone = [i for i, e in enumerate(entries) if e.token not in kept]
                    assert len(gone) == num and all(entries[i].token in may for i in gone)
                    if set(gone) != set(lowest):
                        highest = max(worth[i] for i in gone)
                        limit = worth[lowest[-1]]
                        close = 2**-10 * -limit if self.sizes.policy == "key-norm" else CLOSE
                        assert highest - limit <= close, (layer, head)
                    self.num_swapped += len(set(gone) - set(lowest))
                self.num_dropped += num
                heads[head] = [e for i, e in enumerate(entries) if i not in gone]

    def index(self) -> list[list[list[int]]]:
        return [[[e.token for e in head] for head in heads] for heads in self.lists]
