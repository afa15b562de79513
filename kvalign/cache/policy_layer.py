"""Layer of a streaming cache of which a policy evicts any entry, another one in each head.

     places  0 1 2 3 | 4 5 6 ... C-1        sinks stay in front, entries in the order of time
     head 0  0 1 2 3 | 7 9 30 ... 99
     head 1  0 1 2 3 | 4 5 31 ... 99        which tokens they are of, differs

A policy scores the entries that a step sees. Before the next step those with the lowest scores are
evicted. The rest are placed by rank: the r-th kept entry gets position r. This needs only entries
that can be placed from their original form (rotations, tables). With `positions="keep"` nothing is
placed, and positions grow with the stream.
"""

from collections.abc import Sequence
from functools import partial
from typing import Self, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from kvalign.aligners import Move
from kvalign.aligners.entries import KV, cat
from kvalign.cache.attention import placed_attention
from kvalign.cache.layer import Owner, ReadTensor, StreamingLayer
from kvalign.cache.passes import Pass
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import REGISTERED, ModelSpec, window_of
from kvalign.models.attention import mark
from kvalign.policies import POLICIES
from kvalign.policies.base import Policy, Seen


@final
class PolicyLayer(StreamingLayer):
    """Entries in the order of time, with a score for each head from the policy. Rows are
    right-aligned; missing entries of a shorter row are 0 and have token -1.

    Attributes:
        entries: [B, H, S, D], without their position, except sinks, which keep theirs.
        index: [B, H, S] int64, their tokens' positions in the stream.
        scores: [B, H, S] float32, the policy's last scores; 0 for entries without one.
    """

    def __init__(self, cache: Owner, layer_idx: int, policy: Policy, sizes: CacheSizes):
        self.policy, self.sizes = policy, sizes
        super().__init__(cache, layer_idx)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.entries = KV(key_states.detach(), value_states.detach()).slots(0, 0)
        shape = self.entries.keys.shape[:3]
        self.index = torch.empty(shape, dtype=torch.int64, device=self.device)
        self.scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.is_initialized = True

    def reset(self) -> None:
        super().reset()
        self.entries = KV(torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0))
        self.index = torch.empty(0, 0, 0, dtype=torch.int64)
        self.scores = torch.empty(0, 0, 0, dtype=torch.float32)

    def take(self, step: Pass, new: KV) -> KV:
        # 1. What attention sees: entries placed by rank, and the new ones as they are.
        entries = cat([*self.pieces(step), new])
        # 2. What is kept of the new ones.
        stored = self.without_position(step, new).map(Tensor.detach)
        self.entries = cat([self.entries, stored])
        new_tokens = torch.arange(step.num_new, device=self.device)
        tokens = torch.tensor(step.seen, device=self.device)[:, None, None] + new_tokens
        tokens = tokens.expand(-1, self.index.shape[1], -1)
        self.index = torch.cat([self.index, tokens], 2)
        self.scores = pad(self.scores, (0, step.num_new))
        # 3. What they are worth, where the policy wants to know it or has to say who goes.
        if self.policy.accumulates or step.evicts:
            if self.policy.reads_weights:
                mark(entries.keys, partial(self._attend, step))
            else:
                self._score(step, entries)
        return entries

    def _attend(
        self, step: Pass, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of queries [B, H, T, D], with weights for the policy: [B, T, H, D]."""
        places = step.sights()[0].places.to(keys.device)
        out, weights = placed_attention(places, query, keys, values, scale)
        self._score(step, KV(keys, values), weights.mean(2))
        return out

    def _score(self, step: Pass, entries: KV, weights: Tensor | None = None) -> None:
        num_fed = [n + step.num_new for n in step.seen]
        before = self.scores[:, :, : self.scores.shape[2] - step.num_new]
        seen = Seen(self.layer_idx, num_fed, *entries, weights, before)
        self.scores = self.policy.score(seen).detach()

    def begin(self, step: Pass, shifts: list[int]) -> None:
        """Evict: keep the entries with the highest scores, as many of each row as a pass finds."""
        num, sizes = self.index.shape[2], self.sizes
        if num == step.num_before:
            return
        seen = torch.tensor(step.seen, device=self.device)[:, None, None]
        assert sizes.num_recent is not None
        stays = (self.index < sizes.num_sinks) | (self.index >= seen - sizes.num_recent)
        worth = self.policy.worth(self.scores)
        scores = worth.masked_fill(stays, torch.inf).masked_fill(self.index < 0, -torch.inf)
        if step.is_even and num == step.num_before + 1:
            # The usual step, in one comparison; of equal scores argmin takes the first.
            slots = torch.arange(num - 1, device=self.device)
            kept_slots = slots + (slots >= scores.argmin(-1, keepdim=True))
        else:
            ranks = scores.argsort(dim=-1, stable=True).argsort(-1)
            stored = torch.tensor(step.stored, device=self.device)[:, None, None]
            is_kept = ranks >= num - stored
            # Those that are kept behind those that are not, each in the order of time.
            kept_slots = is_kept.long().argsort(dim=-1, stable=True)[:, :, num - step.num_before :]
            self.index = self.index.masked_fill(~is_kept, -1)
            self.entries = self.entries.map(lambda x: x.masked_fill(~is_kept[..., None], 0))
        self.index, self.scores = (x.gather(2, kept_slots) for x in (self.index, self.scores))
        slots = kept_slots[..., None]
        self.entries = self.entries.map(lambda x: x.gather(2, slots.expand(-1, -1, -1, x.shape[3])))

    def pieces(self, step: Pass) -> list[KV]:
        num = step.num_before
        if step.is_even:
            return self._place(self.entries)
        rows = []
        for row, num_own in enumerate(step.stored):
            own = self.entries.slots(num - num_own, num_own).rows(slice(row, row + 1))
            rows.append(cat(self._place(own)).padded(num))
        return [cat(rows, dim=0)]

    def _place(self, entries: KV) -> list[KV]:
        """Sinks, and the others at their present positions: the r-th at position r."""
        num = entries.keys.shape[2]
        num_sinks = min(num, self.sizes.num_sinks)
        now = torch.arange(num_sinks, num, device=self.device)
        window, move = entries.slots(num_sinks, num - num_sinks), Move(0, num_sinks, now)
        placed = self.realigner.place(self.layer_idx, window, move)
        return [entries.slots(0, num_sinks), placed.map(lambda x: x.to(self.dtype))]

    def tokens_of(self, row: int, num: int) -> Tensor:
        """Tokens of a row's entries, of which there are so many, by head: [H, S] int64."""
        if not self.is_initialized:
            return torch.empty(0, 0, dtype=torch.int64)
        return self.index[row, :, self.index.shape[2] - num :].cpu()

    def select(self, rows: Tensor) -> None:
        at = rows.to(self.device)
        self.entries = self.entries.rows(at)
        self.index, self.scores = self.index[at], self.scores[at]

    def join(self, layers: Sequence[Self]) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*layers[0].entries)
        width = max(layer.index.shape[2] for layer in layers)
        of_layers = [(layer, width - layer.index.shape[2]) for layer in layers]
        index = torch.cat([pad(layer.index, (n, 0), value=-1) for layer, n in of_layers])
        scores = torch.cat([pad(layer.scores, (n, 0)) for layer, n in of_layers])
        entries = cat((layer.entries.padded(width) for layer in layers), dim=0)
        self.index, self.scores, self.entries = index, scores, entries

    def state(self) -> dict[str, Tensor]:
        return self.entries._asdict() | {"index": self.index, "scores": self.scores}

    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        width = max(map(self.sizes.num_stored, seen))
        entries = KV(*(read(name, (width, head_dim), dtype).clone() for name in KV._fields))
        self.lazy_initialization(*entries)
        self.entries = entries
        self.index = read("index", (width,), torch.int64).clone()
        self.scores = read("scores", (width,), torch.float32).clone()


def policy_of(
    spec: ModelSpec, sizes: CacheSizes, realigner: Realigner, config: PretrainedConfig | None
) -> tuple[Policy, Realigner, int | None]:
    """Return the policy of a cache, the realigner that places its entries by rank or, where they
    keep their positions, leaves them, and the number of tokens after which there is no position
    left. UserError if one does not fit the model.
    """
    name, policy = spec.name or "this model", POLICIES[sizes.policy](sizes.cache_size)
    if policy.reads_weights and spec.model_type not in REGISTERED:
        raise UserError(
            f"policy {policy.name} reads attention weights, which {spec.model_type} models do not "
            "expose: use key-norm, keydiff or random"
        )
    if policy.reads_weights and config is not None and window_of(config) is not None:
        raise UserError(
            f"policy {policy.name} reads attention over all entries, but layers of {name} see only "
            "a window"
        )
    if sizes.positions == "compact":
        return policy, realigner.from_birth(), None
    if spec.family == "alibi":
        raise UserError(f"positions=keep is not for {name}: ALiBi computes its bias from places")
    is_bounded = realigner.rotation is None or realigner.rotation.is_bounded
    return policy, Realigner(), spec.context_len if is_bounded else None
