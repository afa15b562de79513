"""Every way to stream written out anew over a plain model of transformers, in any precision: a list
of entries as each was computed, which are put where they lie now before each pass.

Nothing of kvalign is used but the numbers of an aligner, and the keys that 8 bits are stored
without. In float64 it is exact; in the precision of what is tested, or with entries that are
rounded to 8 bits, it says how far from that any honest loop is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

NOT_RELATIVE = ("gpt_neo", "mpt", "falcon")  # whose attention cannot be read token by token
READS_WEIGHTS = ("tova", "h2o", "second-chance")


def copy_of(model: PreTrainedModel, dtype: torch.dtype, attention: str = "eager"):
    """The same model in another precision, its frequencies as they are."""
    config = type(model.config)(**model.config.to_dict(), experts_implementation="eager")
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    copy = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    torch.set_default_dtype(kept)
    copy.load_state_dict(model.state_dict())
    return copy.eval().requires_grad_(False)


@dataclass(frozen=True)
class Plan:
    """What a stream does with its entries; `aligner`: none, or its kind; `rounds`: to 8 bits, the
    keys without these of each layer.
    """

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
    rounds: dict[int, Tensor] | None = None

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
        self.turning = turning_of(model, self.dtype)
        self.is_by_place = getattr(config, "alibi", plan.kind in ("bloom", "mpt"))
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        heads = 1 if getattr(config, "multi_query", False) else heads
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
        told = {} if self.is_by_place else {"position_ids": torch.arange(at, at + num)[None]}
        # Where entries are not copied, they are corrected before the step that writes them.
        at_once = plan.policy == "oldest" and (plan.kind != "gpt_neo" or plan.rounds is not None)
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
            born = self._turned(layer, born, -self.births[layer])
            if plan.aligner != "none":
                born, placed = (
                    self._realigned(layer, name, x, now)
                    for name, x in (("key", born), ("value", written))
                )
                value = torch.where(stays, value, placed)
            key = torch.where(stays, key, self._turned(layer, born, now))
        key = self._turned(layer, key, shifts)
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
        """New keys and values [H, S, D] as they are written: of table-network, after something was
        evicted, changed by a network, which sees all heads without positions.
        """
        if self.plan.rounds is not None:
            return self._rounded(births, seen, layer, keys, values)
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

    def _rounded(
        self, births: Tensor, seen: int, layer: int, keys: Tensor, values: Tensor
    ) -> Sequence[Tensor]:
        """What 8 bits are of new keys and values: without position, base, mean and scale."""
        base, rounded = (self.plan.rounds or {}).get(layer, 0.0), []
        is_sink = seen + torch.arange(len(births)) < self.plan.num_sinks
        for name, x, less in (
            ("key", self._turned(layer, keys, -births), base),
            ("value", values, 0),
        ):
            mean, scale = 0.0, torch.ones(())
            if self.plan.aligner == "table":
                mean, scale = (self.numbers[f"{name}{y}"][layer][:, births] for y in ("", "_scale"))
                mean = mean.masked_fill(is_sink[:, None], 0)
                scale, less = scale.masked_fill(is_sink, 1)[..., None], 0
            rounded.append(in_8_bits((x - mean) / scale - less) * scale + mean + less)
        return self._turned(layer, rounded[0], births), rounded[1]

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
            key = self._turned(i, key, torch.full(key.shape[1:2], -shift))
            for first in reversed(range(self._behind(), self._behind() + shift)):
                now = torch.arange(first, first + key.shape[1])
                key = key + self._network(i, "key", key, now)
                value = value + self._network(i, "value", value, now)
            self.raw[i] = _cat(old, (key, value))

    def _turned(self, layer: int, x: Tensor, by: Tensor) -> Tensor:
        return self.turning[layer](x, by)

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


def in_8_bits(x: Tensor) -> Tensor:
    """Vectors [..., D] whose numbers are of 255, up to the greatest."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


def turning_of(model: PreTrainedModel, dtype: torch.dtype) -> list[Callable]:
    """Of each layer, what moves its keys [..., S, D] by so many positions, [S] or one each."""
    config = model.config
    rotary = rotary_of(model)
    if rotary is None:
        return [lambda x, by: x] * config.num_hidden_layers
    turns = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    are_neighbours = config.model_type in ("cohere", "glm", "llama4_text")
    inv_freq = rotary.inv_freq.to(dtype)
    turn = partial(_turned, inv_freq=inv_freq, are_neighbours=are_neighbours)
    return [turn if is_turned else lambda x, by: x for is_turned in turns]


def rotary_of(model: PreTrainedModel) -> nn.Module | None:
    """What rotates its keys, if anything does."""
    found = (x for name, x in model.named_modules() if name.endswith("rotary_emb"))
    return None if getattr(model.config, "alibi", False) else next(found, None)


def _turned(x: Tensor, by: int | Tensor, inv_freq: Tensor, are_neighbours: bool) -> Tensor:
    angles = torch.as_tensor(by)[..., None] * inv_freq
    cos, sin, num = angles.cos(), angles.sin(), 2 * len(inv_freq)
    pairs = x[..., :num].unflatten(-1, (-1, 2) if are_neighbours else (2, -1))
    first, second = pairs.unbind(-1 if are_neighbours else -2)
    both = [first * cos - second * sin, second * cos + first * sin]
    both = torch.stack(both, -1 if are_neighbours else -2).flatten(-2)
    return torch.cat([both, x[..., num:].expand(*both.shape[:-1], -1)], -1)


def _cat(old, new):
    return tuple(torch.cat(pair, 1) for pair in zip(old, new, strict=True))
