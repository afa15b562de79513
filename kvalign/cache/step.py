"""Forward pass: what it adds to a cache, and where; the same for all layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvalign.cache.bare_keys import InSight
from kvalign.cache.segments import Segment
from kvalign.cache.sizes import CacheSizes
from kvalign.models.architectures import ModelSpec, window_of


@dataclass(frozen=True)
class UnevenRows:
    """Positions of the entries of rows that differ in length.

    Attributes:
        visible: [B, S] bool, the entries that a row has; the last of S is the newest.
        inside: [B, S] bool, its entries after the sinks.
        places: [B, S] int64, positions of each row's entries after the sinks; 0 elsewhere.
    """

    visible: Tensor
    inside: Tensor
    places: Tensor


@dataclass(frozen=True)
class DecodeStep:
    """Usual pass: one token in rows that have their sinks. It is described completely before it
    begins. So its layers do the same in every step, and it can be compiled.

    Attributes:
        slot: buffer slot to write.
        num_visible: entries for attention; the new one is the last.
        birth: the token's cache slot, in rows of equal length.
        position_ids: [B, 1] int64, its position.
        at: [B, 1, 1] int64, the same in another shape.
        newest: positions of the token's key, as of `Step.at`.
        all_visible: those of all entries for attention.
        in_sight: these entries for our kernel, where it reads them as they are stored.
    """

    slot: int
    num_visible: int
    birth: slice
    position_ids: Tensor
    at: Tensor
    newest: slice | Tensor
    all_visible: slice | Tensor
    in_sight: InSight | None


@dataclass(frozen=True)
class Step:
    """Forward pass over `num_new` tokens of each row.

    Attributes:
        device: of the first layer, where the tensors for all layers are made.
        seen: tokens of each row before the pass.
        stored: entries of each row before the pass.
        behind: number by which each row's positions have run on.
        positions: position of each row's first new token.
        births: cache slot of each row's first new token.
        num_before: entries that the longest row finds.
        first_place: position of the first entry after the sinks, in rows of equal length.
        behind_rows: [B, 1, 1] int64, `behind` in another shape.
        uneven: None if rows have equal lengths.
        segment: positions of each token, if the tokens count as fed one by one.
        decode: description of the usual pass.
    """

    sizes: CacheSizes
    num_new: int
    device: torch.device
    seen: list[int]
    stored: list[int]
    behind: list[int]
    positions: list[int]
    births: list[int]
    num_before: int
    first_place: int
    behind_rows: Tensor
    uneven: UnevenRows | None
    segment: Segment | None = None
    decode: DecodeStep | None = None

    @classmethod
    def of(
        cls,
        sizes: CacheSizes,
        frame: CacheSizes,
        seen: list[int],
        positions: list[int],
        births: list[int],
        num_new: int,
        segment: Segment | None,
        device: torch.device,
    ) -> "Step":
        """Pass over `num_new` tokens after those that rows have seen."""
        stored, behind = [sizes.num_stored(n) for n in seen], [frame.num_behind(n) for n in seen]
        num_before, uneven = max(stored, default=0), None
        if len(set(stored)) > 1 or len(set(births)) > 1:
            of_rows, born = (torch.tensor(x, device=device)[:, None] for x in (stored, births))
            rank = torch.arange(num_before + num_new, device=device) - num_before + of_rows
            visible, inside = rank >= 0, rank >= sizes.num_sinks
            uneven = UnevenRows(visible, inside, (rank + born - of_rows) * inside)
        return cls(
            sizes=sizes,
            num_new=num_new,
            device=device,
            seen=seen,
            stored=stored,
            behind=behind,
            positions=positions,
            births=births,
            num_before=num_before,
            first_place=sizes.num_sinks + births[0] - stored[0],
            behind_rows=torch.tensor(behind, device=device)[:, None, None],
            uneven=uneven,
            segment=segment,
        )

    def at(self, num: int, num_new: int = 0) -> slice | Tensor:
        """Positions of `num` entries, of which so many are new: a slice, or [B, 1, S] if those of
        rows differ.
        """
        if len(set(self.positions)) == 1:
            end = self.positions[0] + num_new
            return slice(end - num, end)
        ends = torch.tensor(self.positions, device=self.device)[:, None, None] + num_new
        return ends + torch.arange(-num, 0, device=self.device)

    def alike_rows(self) -> list[slice]:
        """All rows if their entries have equal positions, else each."""
        num = len(self.seen)
        return [slice(None)] if self.uneven is None else [slice(i, i + 1) for i in range(num)]

    @property
    def position(self) -> int:
        """Position of the longest row's first new token."""
        return max(self.positions)

    @property
    def num_visible(self) -> int:
        """Entries that the longest row's last new token sees."""
        return self.num_before + self.num_new

    @property
    def is_even(self) -> bool:
        """Return whether rows have equally many entries."""
        return len(set(self.stored)) == 1

    @property
    def evicts(self) -> bool:
        """Return whether an entry is evicted before the next pass."""
        dropped = self.sizes.num_dropped
        return any(dropped(n + self.num_new) > dropped(n) for n in self.seen)

    def inputs_of(self, model: PreTrainedModel, spec: ModelSpec) -> dict[str, Any]:
        """Return the model's extra inputs for one token in rows of unequal lengths: the positions
        of rows that differ, and a mask over the missing entries of shorter rows.
        """
        told: dict[str, Any] = {}
        if len(set(self.positions)) > 1 or not self.is_even:
            told["position_ids"] = torch.tensor(self.positions, device=model.device)[:, None]
        if self.uneven is not None and not self.is_even:
            mask: Any = self._mask(model, spec, self.uneven.visible.to(model.device))
            if spec.states:  # which go by no mask: each row has its own token
                mask = dict.fromkeys(model.config.layer_types) | {"full_attention": mask}
            told["attention_mask"] = mask
        return told

    def _mask(self, model: PreTrainedModel, spec: ModelSpec, visible: Tensor) -> Tensor:
        """Return the model's mask for the entries that rows see, [B, S] bool."""
        config = model.config
        hidden = ~visible[:, None, None]
        if config.model_type == "mpt":
            return hidden
        if spec.family == "alibi":  # from which it counts positions
            return visible.long()
        if window_of(config) is not None:  # which it adds to a mask of all its positions
            return pad(visible.long(), (self.position - self.num_before, 0))
        return torch.finfo(model.dtype).min * hidden.to(model.dtype)

    @property
    def is_single(self) -> bool:
        """Return whether it has one token per row, and no segment."""
        return self.num_new == 1 and self.segment is None

    @property
    def is_decode(self) -> bool:
        """Return whether it can be the usual pass: one token in rows that have their sinks."""
        return self.is_single and min(self.seen) >= self.sizes.num_sinks

    def as_decode(self, slot: int, turns: Tensor | None, by_kernel: bool) -> DecodeStep:
        """The usual pass that writes this slot of the buffers; for our kernel with the turns of
        places.
        """
        in_sight = None
        if by_kernel:
            visible = torch.tensor([n + 1 for n in self.stored])
            in_sight = InSight(torch.tensor([slot]), visible, self.behind_rows, turns)
        position_ids = torch.tensor(self.positions, device=self.device)[:, None]
        return DecodeStep(
            slot=slot,
            num_visible=self.num_visible,
            birth=slice(self.births[0], self.births[0] + 1),
            position_ids=position_ids,
            at=position_ids[:, None],
            newest=self.at(1, 1),
            all_visible=self.at(self.num_visible, 1),
            in_sight=in_sight,
        )
