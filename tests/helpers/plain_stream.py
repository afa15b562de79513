"""Every way to stream written out anew over a plain model of transformers, in any precision: a list
of entries as each was computed, which are put where they lie now before each pass.

Nothing of kvalign is used but the numbers of an aligner. `exact` runs it in float64; in the
precision of what is tested it says how far from that any honest loop is (`bound`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

BY_PLACE = ("bloom", "mpt")  # which are told no positions
NOT_RELATIVE = ("gpt_neo", "mpt")  # whose attention cannot be read token by token
READS_WEIGHTS = ("tova", "h2o", "second-chance")


def copy_of(model: PreTrainedModel, dtype: torch.dtype, attention: str = "eager"):
    """The same model in another precision, its frequencies as they are."""
    config = type(model.config)(**model.config.to_dict())
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    copy = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    torch.set_default_dtype(kept)
    copy.load_state_dict(model.state_dict())
    return copy.eval().requires_grad_(False)


@dataclass(frozen=True)
class Plan:
    """What a stream does with its entries; `aligner`: none, or its kind."""

    kind: str
    cache_size: int
    num_sinks: int = 0
    num_evicted: int = 1
    realign_every: int = 1
    aligner: str = "none"
    policy: str = "oldest"
    num_recent: int = 0
    positions: str = "compact"
    context_len: int = 64

    @property
    def is_slice(self) -> bool:
        return self.policy == "oldest" and self.positions == "compact"

    def dropped(self, seen: int) -> int:
        """Of so many tokens, how many are gone before the next."""
        dropped = 0
        while seen - dropped > self.cache_size:
            dropped += self.num_evicted
        return dropped

    def moved(self, seen: int) -> int:
        """Places by which entries have been moved: whole evictions, `realign_every` or more."""
        size = self.num_evicted
        while size < self.realign_every:
            size += self.num_evicted
        return self.dropped(seen) // size * size

    def takes_at_once(self, seen: int, num: int) -> int:
        """Tokens of an input of `num` that see one another and all that was there before."""
        stored = seen - self.dropped(seen)
        if stored < self.cache_size:
            return min(num, self.cache_size + 1 - stored)
        one_by_one = self.kind not in NOT_RELATIVE and (
            self.aligner == "none"
            or (self.aligner in ("table", "table-network") and self.kind != "bloom")
        )
        if one_by_one or not self.is_slice:
            return 1
        half = max(1, (self.cache_size - self.num_sinks) // 2)
        return min(num, max(1, min(half, self.context_len - seen + self.moved(seen))))


class Correcting(DynamicCache):
    """Cache that changes new entries before attention sees them, if there is a `correct`."""

    def __init__(self, correct: Callable | None, placed: list | None):
        super().__init__(placed)
        self.correct = correct

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Take in the new entries [1, H, T, D] of a layer, and return all."""
        if self.correct is not None:
            raw = (
                x[0].float() if x.dtype != torch.float64 else x[0]
                for x in (key_states, value_states)
            )
            both = self.correct(layer_idx, *raw)
            key_states, value_states = (x[None].to(key_states.dtype) for x in both)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class PlainStream:
    """One stream; `numbers` are an aligner's weights by name, `model` is of `copy_of`."""

    def __init__(self, model: PreTrainedModel, plan: Plan, numbers: dict[str, Tensor]):
        self.model, self.plan, config = model, plan, model.config
        self.dtype = torch.promote_types(model.dtype, torch.float32)  # of what is not the model's
        self.numbers = {name: x.to(self.dtype) for name, x in numbers.items()}
        rotary = getattr(model.base_model, "rotary_emb", None)
        self.inv_freq = None if rotary is None else rotary.inv_freq.to(self.dtype)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.num_layers, self.seen, self.moved = config.num_hidden_layers, 0, 0
        none = torch.empty(heads, 0)
        self.raw = [None] * self.num_layers  # keys and values [H, S, D]
        self.tokens, self.births = ([none.long()] * self.num_layers for _ in range(2))
        self.drawn = [none.to(self.dtype)] * self.num_layers
        # Entries that have been elsewhere than where they were computed.
        self.strayed = [none.bool()] * self.num_layers

    def clone(self) -> "PlainStream":
        """Another that goes on alone."""
        other = object.__new__(type(self))
        lists = {name: list(x) for name, x in self.__dict__.items() if isinstance(x, list)}
        other.__dict__.update(self.__dict__ | lists)
        return other

    def take(self, ids: Tensor) -> Tensor:
        """Take ids [T] in, all of which see what was there before: logits [V] after the last."""
        plan, num = self.plan, len(ids)
        self._move()
        placed = [self._placed(i) for i in range(self.num_layers)] if self.seen else []
        place = self.tokens[0].shape[1] + self._behind()
        at = self.seen if plan.positions == "keep" else place
        told = {} if plan.kind in BY_PLACE else {"position_ids": torch.arange(at, at + num)[None]}
        # Where entries are not copied, they are corrected before the step that writes them.
        at_once = plan.policy == "oldest" and plan.kind != "gpt_neo"
        correct = partial(self._corrected, torch.arange(at, at + num), self.seen)
        cache = Correcting(correct if at_once else None, placed or None)
        reads = plan.policy in READS_WEIGHTS
        out = self.model(ids[None], past_key_values=cache, output_attentions=reads, **told)
        self.found = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        token = torch.arange(self.seen, self.seen + num)
        for i, found in enumerate(self.found):
            new = [x[:, -num:].to(self.dtype) for x in found]
            if plan.aligner == "table-network" and not at_once:
                new += correct(i, *new)  # as they are once they move
            held = self.raw[i]
            self.raw[i] = tuple(new) if held is None else _cat(held, new)
            heads = len(found[0])
            self.tokens[i] = torch.cat([self.tokens[i], token.expand(heads, -1)], 1)
            births = torch.arange(at, at + num).expand(heads, -1)
            self.births[i] = torch.cat([self.births[i], births], 1)
            for held in (self.drawn, self.strayed):
                held[i] = torch.nn.functional.pad(held[i], (0, num))
            if reads:
                weights = out.attentions[i][0].to(self.dtype).unflatten(0, (heads, -1)).mean(1)
                for t in range(num):
                    self.drawn[i] = self.drawn[i] * 0.5 ** (16 / plan.cache_size) + weights[:, t]
                self.weights = self.weights if i else []
                self.weights.append(weights[:, -1])
        self.seen += num
        if plan.is_slice:
            gone = self.tokens[0].shape[1] - (self.seen - plan.dropped(self.seen))
            kept = torch.arange(self.tokens[0].shape[1])
            kept = kept[(kept < plan.num_sinks) | (kept >= plan.num_sinks + gone)]
            self.keep_slots(kept)
        return out.logits[0, -1]

    def edit(self, first: int, stop: int, parts: list["Tensor | PlainStream"]) -> None:
        """Take out the entries of places from `first` to `stop`, take these pieces of ids in there,
        or entries of other streams, and put what stood behind after them. The stream is then as
        long as what it has.
        """
        num = self.tokens[0].shape[1]
        tails = self.clone()
        for stream, kept in ((self, slice(0, first)), (tails, slice(stop, num))):
            stream.keep_slots(torch.arange(num)[kept])
        self._renumber()
        whole = [*parts, *[tails] * (stop < num)]
        for is_encoded, together in groupby(whole, lambda part: isinstance(part, PlainStream)):
            for part in together:
                if is_encoded:
                    self._append(part)
                    continue
                while len(part):
                    num_now = self.plan.takes_at_once(self.seen, len(part))
                    self.take(part[:num_now])
                    part = part[num_now:]
            if is_encoded:
                self._settle()

    def _append(self, other: "PlainStream") -> None:
        for i in range(self.num_layers):
            held = self.raw[i]
            self.raw[i] = other.raw[i] if held is None else _cat(held, other.raw[i])
            for name in ("tokens", "births", "drawn", "strayed"):
                held = getattr(self, name)
                held[i] = torch.cat([held[i], getattr(other, name)[i]], 1)

    def _settle(self) -> None:
        """Evict what is too much, once for all that was appended: nothing lies anywhere between."""
        total = self.tokens[0].shape[1]
        kept, gone = torch.arange(total), self.plan.dropped(total)
        self.keep_slots(kept[(kept < self.plan.num_sinks) | (kept >= self.plan.num_sinks + gone)])
        self._renumber()

    def keep_slots(self, kept: Tensor) -> None:
        """Have the entries in these slots [S] of all heads alone."""
        for i in range(self.num_layers):
            self._keep(i, kept.expand(len(self.tokens[i]), -1))

    def _renumber(self) -> None:
        self.seen, self.moved = self.tokens[0].shape[1], 0
        self.tokens = [torch.arange(self.seen).expand(len(x), -1) for x in self.tokens]
        for i, births in enumerate(self.births):
            self.strayed[i] = self.strayed[i] | (births != self._now(i))

    def _keep(self, layer: int, kept: Tensor) -> None:
        """Have the entries in the slots [H, S] alone."""
        self.raw[layer] = tuple(
            x.gather(1, kept[..., None].expand(-1, -1, x.shape[2])) for x in self.raw[layer]
        )
        for name in ("tokens", "births", "drawn", "strayed"):
            held = getattr(self, name)
            held[layer] = held[layer].gather(1, kept)

    def _now(self, layer: int) -> Tensor:
        """Places [H, S] of entries; those of sinks stay."""
        tokens = self.tokens[layer]
        return torch.arange(tokens.shape[1]) + self._behind() * (tokens >= self.plan.num_sinks)

    def _behind(self) -> int:
        return self.plan.dropped(self.seen) - self.plan.moved(self.seen)

    def _placed(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, S, D] where they lie now."""
        plan, (key, value, *corrected) = self.plan, self.raw[layer]
        now = self._now(layer)[0]
        is_sink = self.tokens[layer] < plan.num_sinks
        # Sinks follow the others, where only differences of positions count.
        shifts = is_sink * self._behind()
        if plan.positions == "compact" and plan.aligner != "network":
            self.strayed[layer] = self.strayed[layer] | (self.births[layer] != now)
            stays = ~self.strayed[layer][..., None]
            if corrected and plan.policy != "oldest":  # there all are placed at each step
                stays = stays & (key == corrected[0]).all(-1, keepdim=True)
            born, written = corrected or (key, value)
            born = self._turned(born, -self.births[layer])
            if plan.aligner != "none":
                born, placed = (
                    self._realigned(layer, name, x, now)
                    for name, x in (("key", born), ("value", written))
                )
                value = torch.where(stays, value, placed)
            key = torch.where(stays, key, self._turned(born, now))
        key = self._turned(key, shifts)
        return key.to(self.model.dtype)[None], value.to(self.model.dtype)[None]

    def _realigned(self, layer: int, name: str, x: Tensor, now: Tensor) -> Tensor:
        """Entries [H, S, D] of their births, as they would be at the places `now` [S]."""
        mean, scale = (self.numbers[f"{name}{end}"][layer] for end in ("", "_scale"))
        births = self.births[layer]
        head = torch.arange(len(x))[:, None]
        inside = births.clamp(max=mean.shape[1] - 1)  # of sinks alone nothing comes of it
        x = (x - mean[head, inside]) / scale[head, inside][..., None]
        return mean[:, now] + x * scale[:, now][..., None]

    def _corrected(
        self, births: Tensor, seen: int, layer: int, keys: Tensor, values: Tensor
    ) -> Sequence[Tensor]:
        """New keys and values [H, S, D]: of table-network those that are written after something
        was evicted have been changed by a network, which sees all heads without positions.
        """
        if self.plan.aligner != "table-network":
            return keys, values

        def affine(x: Tensor, name: str) -> Tensor:
            weight, bias = (self.numbers[f"network.{layer}.{name}.{y}"] for y in ("weight", "bias"))
            return x @ weight.T + bias

        both, rows, is_late = (
            {"key": keys, "value": values},
            [],
            seen + torch.arange(len(births)) > self.plan.cache_size,
        )
        for name, x in both.items():
            mean, scale = (self.numbers[f"{name}{end}"][layer][:, births] for end in ("", "_scale"))
            rows += [*(x - mean) / scale[..., None]]
        hidden = affine(torch.cat(rows, -1), "hidden").clamp(min=0)  # [S, hidden]
        changed = []
        for name, x in both.items():
            scale = self.numbers[f"{name}_scale"][layer][:, births] * is_late
            change = affine(hidden, name).view(len(births), len(x), -1).transpose(0, 1)
            changed.append(x + change * scale[..., None])
        return changed

    def _network(self, layer: int, name: str, x: Tensor, now: Tensor) -> Tensor:
        """What the paper's network adds to entries [H, S, D]: two hidden layers, on the entry and
        on what was learned of its position, layer and head.
        """

        def of(part):
            return self.numbers[f"{name}.{part}"]

        heads, num, _ = x.shape
        told = [of("position.weight")[now].expand(heads, -1, -1)]
        told.append(of("layer.weight")[layer].expand(heads, num, -1))
        told.append(of("head.weight")[:, None].expand(-1, num, -1))
        hidden = torch.cat([x, *told], -1)
        for part in ("fc1", "fc2"):
            hidden = (hidden @ of(f"{part}.weight").T + of(f"{part}.bias")).clamp(min=0)
        return hidden @ of("fc3.weight").T + of("fc3.bias")

    def _move(self) -> None:
        """The paper's network moves entries place by place, from its own last output."""
        plan, moved = self.plan, self.plan.moved(self.seen)
        shift, self.moved = moved - self.moved, moved
        if plan.aligner != "network" or not shift:
            return
        for i, (key, value) in enumerate(self.raw):
            sinks = min(plan.num_sinks, key.shape[1])
            key, value, old = key[:, sinks:], value[:, sinks:], (key[:, :sinks], value[:, :sinks])
            key = self._turned(key, torch.full(key.shape[1:2], -shift))
            for first in reversed(range(self._behind(), self._behind() + shift)):
                now = torch.arange(first, first + key.shape[1])
                key = key + self._network(i, "key", key, now)
                value = value + self._network(i, "value", value, now)
            self.raw[i] = _cat(old, (key, value))

    def _turned(self, x: Tensor, by: Tensor) -> Tensor:
        return turned(x, by, self.inv_freq)

    def scores(self, layer: int) -> Tensor:
        """What entries are worth by figures that rounding changes: [H, S]."""
        policy, keys = self.plan.policy, self.found[layer][0].to(self.dtype)
        num_heads, num = keys.shape[:2]
        if policy == "oldest":
            return torch.arange(num).expand(num_heads, num).to(self.dtype)
        if policy == "random":
            generator = torch.Generator().manual_seed(self.seen * 4096 + layer)
            return torch.rand(num_heads, num, generator=generator).to(self.dtype)
        if policy == "key-norm":
            return -keys.norm(dim=-1)
        if policy == "keydiff":
            unit = keys / keys.norm(dim=-1, keepdim=True)
            mean = unit.mean(1, keepdim=True)
            return -(unit * mean / mean.norm(dim=-1, keepdim=True)).sum(-1)
        if policy == "tova":
            return self.weights[layer].mean(0).expand(num_heads, num)
        return self.drawn[layer]

    def evict(self, kept: Tensor, rough: "PlainStream", factor: float) -> int:
        """Keep the tokens [L, H, S] that were kept, here and in the loop that says how far scores
        are off; how many are others than here. AssertionError if their scores do not allow it.
        """
        num_other = 0
        for i in range(self.num_layers):
            stays = (self.tokens[i][:, :, None] == kept[i][:, None]).any(-1)
            assert (stays.sum(1) == kept.shape[2]).all(), "other tokens are kept than there were"
            first_recent = self.seen - self.plan.num_recent
            may = (self.tokens[i] >= self.plan.num_sinks) & (self.tokens[i] < first_recent)
            assert (stays | may).all(), "what must stay is gone"
            if not stays.all():
                num_other += self._compare(i, stays, may, rough, factor)
            slots = stays.nonzero()[:, 1].view(len(stays), -1)
            for one in {id(x): x for x in (self, rough)}.values():
                one._keep(i, slots)
        return num_other

    def _compare(self, layer, stays, may, rough, factor) -> int:
        scores = self.scores(layer)
        off = factor * (rough.scores(layer).double() - scores).abs().max() + 1e-5
        low, high = scores - off, scores + off
        if self.plan.policy == "key-norm":  # to 11 bits
            low, high = low * (1 + 2**-10), high * (1 - 2**-10)
        if self.plan.policy == "second-chance":
            mean, ranks = scores.mean(-1, keepdim=True), torch.arange(scores.shape[1])
            low, high, scores = (
                ranks + scores.shape[1] * (x >= 0.3 * y)
                for x, y in ((low, mean + off), (high, mean - off), (scores, mean))
            )
        num_gone = (~stays).sum(1)
        worst = torch.where(stays, -torch.inf, low.double()).amax(1)
        best = torch.where(stays & may, high.double(), torch.inf).amin(1)
        assert (worst <= best).all(), f"layer {layer}: what was worth more is gone"
        order = torch.where(may, scores.double(), torch.inf).argsort(dim=1, stable=True)
        lowest = order[:, : int(num_gone[0])]
        return int(stays.gather(1, lowest).sum())


class PlainWindow:
    """One stream that is encoded anew at each step: `recompute`, `discard-half`, `dense`."""

    def __init__(self, model: PreTrainedModel, plan: Plan, numbers: dict[str, Tensor]):
        self.model, self.plan, self.ids, self.seen = model, plan, [], 0

    def clone(self) -> "PlainWindow":
        other = PlainWindow(self.model, self.plan, {})
        other.ids, other.seen = list(self.ids), self.seen
        return other

    def take(self, ids: Tensor) -> Tensor:
        """Take ids [T] in; logits [V] after the last."""
        num_sinks = self.plan.num_sinks
        for token in ids.tolist():
            self.ids.append(token)
            while len(self.ids) - 1 > self.plan.cache_size:
                del self.ids[num_sinks : num_sinks + self.plan.num_evicted]
        self.seen += len(ids)
        return self.model(torch.tensor([self.ids]), use_cache=False).logits[0, -1]


def turned(x: Tensor, by: int | Tensor, inv_freq: Tensor | None) -> Tensor:
    """Rotary keys [..., S, D] moved by so many positions, [S] or one each; without frequencies as
    they are.
    """
    if inv_freq is None:
        return x
    angles = torch.as_tensor(by)[..., None] * inv_freq
    num = len(inv_freq)
    first, second, rest = x[..., :num], x[..., num : 2 * num], x[..., 2 * num :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _cat(old, new):
    return tuple(torch.cat(pair, 1) for pair in zip(old, new, strict=True))
