"""What one forward pass adds to a cache, and where: the same for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.segments import Segment
from kvalign.cache.sizes import CacheSizes


@dataclass(frozen=True)
class UnevenRows:
    """Where rows that are not alike find their entries.

    Attributes:
        visible: [B, S] bool, the entries that a row has; the last of S is the newest.
        inside: [B, S] bool, those of them after its sinks.
        places: [B, S] int64, where each row finds its entries after the sinks; 0 elsewhere.
    """

    visible: Tensor
    inside: Tensor
    places: Tensor


@dataclass(frozen=True)
class DecodeStep:
    """The usual pass: one token in rows alike that have their sinks. All of it is said before it
    begins, so what its layers do is the same from step to step, and can be compiled.

    Attributes:
        slot: of the buffers, that is written.
        num_visible: entries that attention gets, the new one the last.
        birth: the place that the token takes.
        position_ids: [B, 1] int64, where it is computed.
        at: [B, 1, 1] int64, the same for what has the rows of a batch.
    """

    slot: int
    num_visible: int
    birth: slice
    position_ids: Tensor
    at: Tensor


@dataclass(frozen=True)
class Step:
    """One forward pass over `num_new` tokens of each row.

    Attributes:
        device: of the first layer, where what is made for all of them lies.
        seen: tokens of each row before.
        stored: entries of each row before.
        behind: by how much each row's positions have run on.
        positions: where each row's first new token is computed.
        births: the place that each row's first new token takes.
        num_before: entries that the longest row finds.
        first_place: where rows that are alike find their first entry after the sinks.
        behind_rows: [B, 1, 1] int64, `behind` for what has the rows of a batch.
        uneven: None if rows are alike.
        segment: what is known of each token, if they count as fed one by one.
        decode: of the usual pass.
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
        """The pass over `num_new` tokens after those that rows have seen."""
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

    @property
    def position(self) -> int:
        """Where the longest row's first new token is computed."""
        return max(self.positions)

    @property
    def num_visible(self) -> int:
        """Entries that the longest row's last new token sees."""
        return self.num_before + self.num_new

    @property
    def is_even(self) -> bool:
        """Whether rows have equally many entries."""
        return len(set(self.stored)) == 1

    @property
    def evicts(self) -> bool:
        """Whether an entry goes before the next pass."""
        dropped = self.sizes.num_dropped
        return any(dropped(n + self.num_new) > dropped(n) for n in self.seen)

    def inputs_of(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """What a model must be told to take one token of rows of unequal lengths: the positions of
        rows that differ, and a mask over what a shorter one lacks.
        """
        kind, told = model.config.model_type, {}
        if len(set(self.positions)) > 1 or not self.is_even:
            told["position_ids"] = torch.tensor(self.positions, device=model.device)[:, None]
        if self.uneven is not None and not self.is_even:
            visible = self.uneven.visible.to(model.device)
            hidden = ~visible[:, None, None]
            told["attention_mask"] = {
                "bloom": visible.long(),  # from which it counts positions
                "mpt": hidden,
            }.get(kind, torch.finfo(model.dtype).min * hidden.to(model.dtype))
        return told

    @property
    def is_decode(self) -> bool:
        """Whether it can be the usual pass: one token in rows alike that have their sinks."""
        is_alike = self.uneven is None and min(self.seen) >= self.sizes.num_sinks
        return self.num_new == 1 and is_alike and self.segment is None

    def as_decode(self, slot: int) -> DecodeStep:
        """The usual pass, which writes this slot of the buffers."""
        position_ids = torch.tensor(self.positions, device=self.device)[:, None]
        return DecodeStep(
            slot=slot,
            num_visible=self.num_visible,
            birth=slice(self.births[0], self.births[0] + 1),
            position_ids=position_ids,
            at=position_ids[:, None],
        )
