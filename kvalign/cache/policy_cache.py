"""A streaming cache from which any entry may go, in each layer and head another one.

     places  0 1 2 3 | 4 5 6 ... C-1        sinks stay in front, entries in the order of time
     head 0  0 1 2 3 | 7 9 30 ... 99
     head 1  0 1 2 3 | 4 5 31 ... 99        which tokens they are of, differs

A policy scores the entries as a step sees them; before the next step the lowest go. Those that stay
are placed by their rank: an entry of token j, the r-th of those that are kept, counts as lying at
position r. What is placed from its birth (rotations, tables) can be placed anywhere, so that is
all. With `positions="keep"` nothing is placed: positions grow with the stream.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from kvalign.aligners import Move
from kvalign.aligners.base import KeysValues
from kvalign.cache.cache_layer import Read, StreamingLayer
from kvalign.cache.realign import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec
from kvalign.models.attention import REGISTERED, install, mark
from kvalign.policies import POLICIES
from kvalign.policies.base import Seen

log = logging.getLogger(__name__)


class PolicyLayer(StreamingLayer):
    """One layer. Rows are right-aligned; what a shorter one lacks is 0 and of token -1.

    Attributes:
        held: keys and values [B, H, S, D] in the order of time, as they are placed from: sinks as
            they are.
        index: [B, H, S] int64, of which tokens of the stream.
        scores: [B, H, S] float32, what the policy gave them last; 0 of those it has not seen.
    """

    cache: "PolicyCache"
    holds_anchored = True

    def reset(self) -> None:
        super().reset()
        self.held: list[Tensor] = []

    @property
    def is_filled(self) -> bool:
        return bool(self.held) and self.held[0].shape[2] > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.held = [x[:, :, :0] for x in (key_states, value_states)]
        shape = self.held[0].shape[:3]
        self.index = torch.empty(shape, dtype=torch.int64, device=self.device)
        self.scores = torch.empty(shape, device=self.device)
        self.is_initialized = True

    def _take(self, step: Step, new: KeysValues) -> KeysValues:
        if not self.is_initialized:
            self.lazy_initialization(*new)
        pairs = zip(self._pieces(step), new, strict=True)
        keys, values = (torch.cat([*pieces, x], 2) for pieces, x in pairs)
        self._hold(step, new)
        policy = self.cache.policy
        if policy.accumulates or self.cache.is_full_after(step):
            if policy.reads_weights:
                mark(keys, partial(self._read, step))
            else:
                self._score(step, keys, values)
        return keys, values

    def _hold(self, step: Step, new: KeysValues) -> None:
        stored = self._stored_form(step, new)
        self.held = [torch.cat([x, y.detach()], 2) for x, y in zip(self.held, stored, strict=True)]
        seen = step.seen_rows.to(self.device)
        tokens = (seen + torch.arange(step.num_new, device=self.device)).expand(
            -1, self.index.shape[1], -1
        )
        self.index = torch.cat([self.index, tokens], 2)
        self.scores = pad(self.scores, (0, step.num_new))

    def _read(
        self, step: Step, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of queries [B, H, T, D] over all entries, whose weights the policy sees: [B, T,
        H, D].
        """
        query = query.unflatten(1, (keys.shape[1], -1)).float() * scale  # [B, H_kv, G, T, D]
        scores = query @ keys.float()[:, :, None].mT
        num_new, num = scores.shape[-2:]
        if num_new > 1:
            future = torch.ones(num_new, num, dtype=torch.bool, device=keys.device)
            scores = scores.masked_fill(future.triu(num - num_new + 1), -torch.inf)
        if step.places is not None:
            visible = step.visible[:, None, None, None].to(keys.device)
            scores = scores.masked_fill(~visible, -torch.inf)
        weights = scores.softmax(-1)
        self._score(step, keys, values, weights.mean(2))
        out = weights @ values.float()[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)

    def _score(
        self, step: Step, keys: Tensor, values: Tensor, weights: Tensor | None = None
    ) -> None:
        num_fed = [n + step.num_new for n in step.seen]
        before = self.scores[:, :, : self.scores.shape[2] - step.num_new]
        seen = Seen(self.layer_idx, num_fed, keys, values, weights, before)
        self.scores = self.cache.policy.score(seen)

    def evict(self, step: Step) -> None:
        """Keep what is worth the most: so many entries of each row as the step says."""
        num = self.index.shape[2]
        if num == step.num_before:
            return
        sizes = self.cache.sizes
        seen = step.seen_rows.to(self.device)
        assert sizes.num_recent is not None
        stays = (self.index < sizes.num_sinks) | (self.index >= seen - sizes.num_recent)
        worth = self.cache.policy.worth(self.scores)
        scores = worth.masked_fill(stays, torch.inf).masked_fill(self.index < 0, -torch.inf)
        if step.is_even and num == step.num_before + 1:
            # The usual step, in one comparison; of equal scores argmin takes the first.
            slots = torch.arange(num - 1, device=self.device)
            kept = slots + (slots >= scores.argmin(-1, keepdim=True))
        else:
            ranks = scores.argsort(dim=-1, stable=True).argsort(-1)
            stored = torch.tensor(step.stored, device=self.device)[:, None, None]
            is_kept = ranks >= num - stored
            # Those that are kept behind those that are not, each in the order of time.
            kept = is_kept.long().argsort(dim=-1, stable=True)[:, :, num - step.num_before :]
            self.index = self.index.masked_fill(~is_kept, -1)
            self.held = [x.masked_fill(~is_kept[..., None], 0) for x in self.held]
        self.index, self.scores = (x.gather(2, kept) for x in (self.index, self.scores))
        at = kept[..., None].expand(-1, -1, -1, self.held[0].shape[3])
        self.held = [x.gather(2, at) for x in self.held]

    def placed(self, step: Step) -> list[Tensor]:
        return [torch.cat(pieces, 2) for pieces in self._pieces(step)]

    def _pieces(self, step: Step) -> list[list[Tensor]]:
        """Keys and values before a step, where they are now, in parts to be put together."""
        realigner, num = self.cache.realigner, step.num_before
        if realigner is None or num <= step.sizes.num_sinks:
            return [[x] for x in self.held]
        if step.is_even:
            return self._placed(realigner, self.held, step.stored[0])
        rows = [
            self._placed(realigner, [x[row : row + 1, :, num - n :] for x in self.held], n)
            for row, n in enumerate(step.stored)
        ]
        return [
            [
                torch.cat(
                    [
                        pad(torch.cat(row[i], 2), (0, 0, num - n, 0))
                        for row, n in zip(rows, step.stored, strict=True)
                    ]
                )
            ]
            for i in range(2)
        ]

    def _placed(self, realigner: Realigner, held: Sequence[Tensor], num: int) -> list[list[Tensor]]:
        num_sinks = min(num, self.cache.sizes.num_sinks)
        if num == num_sinks:
            return [[x] for x in held]
        now = torch.arange(num_sinks, num, device=self.device)
        window = [x[:, :, num_sinks:] for x in held]
        placed = realigner.place(self.layer_idx, window[0], window[1], Move(0, num_sinks, now))
        pairs = zip(held, placed, strict=True)
        return [[x[:, :, :num_sinks], y.to(self.dtype)] for x, y in pairs]

    def select(self, rows: Tensor) -> None:
        at = rows.to(self.device)
        self.held = [x[at] for x in self.held]
        self.index, self.scores = self.index[at], self.scores[at]

    def join(self, layers: Sequence[StreamingLayer], width: int) -> None:
        joined = [layer for layer in layers if isinstance(layer, PolicyLayer)]
        if not self.is_initialized:
            self.lazy_initialization(joined[0].held[0], joined[0].held[1])
        lacks = [width - layer.index.shape[2] for layer in joined]
        of_layers = list(zip(joined, lacks, strict=True))
        index = torch.cat([pad(layer.index, (n, 0), value=-1) for layer, n in of_layers])
        scores = torch.cat([pad(layer.scores, (n, 0)) for layer, n in of_layers])
        held = [
            torch.cat([pad(layer.held[i], (0, 0, n, 0)) for layer, n in of_layers])
            for i in range(2)
        ]
        self.index, self.scores, self.held = index, scores, held

    def state(self, width: int) -> dict[str, Tensor]:
        keys, values = self.held
        return {"keys": keys, "values": values, "index": self.index, "scores": self.scores}

    def restore(self, read: Read, width: int, head_dim: int, dtype: torch.dtype) -> None:
        held = [read(name, (width, head_dim), dtype) for name in ("keys", "values")]
        self.lazy_initialization(*held)
        self.held = held
        self.index = read("index", (width,), torch.int64)
        self.scores = read("scores", (width,), torch.float32)


class PolicyCache(StreamingCache):
    """A `StreamingCache` with any policy, entries placed by rank or left where they were computed.

    Args:
        spec, sizes: see `StreamingCache`.
        realigner: what keeps the entries that stay right; it must place them from their birth.
        config: of the model, whose attention hands over its weights where the policy reads them.

    Raises:
        UserError: as `StreamingCache`; a realigner, a model or positions that do not go with it.
    """

    layer_class = PolicyLayer

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None,
        config: PretrainedConfig,
    ):
        self.config, self.policy = config, POLICIES[sizes.policy](sizes.cache_size)
        self.keeps_positions = sizes.positions == "keep"
        self.last_token = self._last_token(spec, realigner) if self.keeps_positions else None
        if self.policy.reads_weights:
            self._check_attention(spec)
        if realigner is not None:
            realigner = None if self.keeps_positions else realigner.from_birth()
        super().__init__(spec, sizes, realigner)

    def _last_token(self, spec: ModelSpec, realigner: Realigner | None) -> int | None:
        """Tokens after which there is no position left."""
        if spec.family == "alibi":
            raise UserError(
                f"positions=keep is not for {spec.name or 'this model'}: ALiBi goes by the place "
                "among the entries that attention is handed"
            )
        rotation = realigner.rotation if realigner else None
        is_bounded = rotation is None or rotation.is_bounded
        return spec.context_len if is_bounded else None

    def _check_attention(self, spec: ModelSpec) -> None:
        name, policy = spec.name or "this model", self.policy.name
        if spec.model_type not in REGISTERED:
            raise UserError(
                f"policy {policy} reads attention weights, which {spec.model_type} models do not "
                "hand over: take key-norm, keydiff or random"
            )
        if getattr(self.config, "sliding_window", None) is not None:
            raise UserError(
                f"policy {policy} reads attention over all entries; layers of {name} see a window"
            )

    def index(self, row: int = 0) -> Tensor:
        """Of a row's entries in each layer and head, the places of their tokens in the stream: [L,
        H, S].
        """
        if not self.seen:
            return torch.empty(len(self.layers), 0, 0, dtype=torch.int64)
        self.settle()
        num = self.sizes.num_stored(self.seen[row])
        index = [layer.index[row].cpu() for layer in self.layers]
        return torch.stack([x[:, x.shape[1] - num :] for x in index])

    def positions(self) -> list[int]:
        return list(self.seen) if self.keeps_positions else super().positions()

    def is_full_after(self, step: Step) -> bool:
        """Whether an entry goes after this step."""
        count = self.sizes.num_dropped
        return any(count(n + step.num_new) > count(n) for n in step.seen)

    def check_room(self, num_new: int) -> None:
        """Raise UserError unless there are positions for so many tokens more."""
        last, seen = self.last_token, max(self.seen, default=0)
        if last is not None and seen + num_new > last:
            raise UserError(
                f"positions=keep ends with the {last} positions of this model, got {num_new} more "
                f"tokens after {seen}: compact does not end"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.step is None:
            self.check_room(1)  # before a model looks up a position that it does not have
        return super().get_seq_length(layer_idx)

    def _settle(self, step: Step) -> None:
        self.check_room(step.num_new)
        if self.layers[0].is_filled:
            for layer in self.layers:
                layer.evict(step)

    def _prepare(self, step: Step) -> None:
        if self.policy.reads_weights:
            install(self.config)
