"""What one forward pass adds to a cache, and where: the same for all layers."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvalign.cache.realign import Realigner
from kvalign.cache.sizes import CacheSizes


@dataclass
class Step:
    """One forward pass.

    Attributes:
        device: of the first layer, where what is made for all of them lies.
        seen: tokens of each row before.
        stored: entries of each row before.
        behind: by how much each row's positions have run on.
        positions: where each row's first new token is computed.
        births: the place that each row's first new token takes.
        behind_rows: [B, 1, 1] int64, `behind` for what has the rows of a batch.
        places: [B, S] int64, where each row finds its entries after the sinks, 0 elsewhere; None
            if rows are alike, which then begin at `first_place`.
        visible, inside: [B, S] bool, the entries that a row has, and those after its sinks; only
            beside `places`.
        is_plain: whether it is one token of rows alike beyond the sinks (`prepare`).
    """

    sizes: CacheSizes
    realigner: Realigner | None
    num_new: int
    device: torch.device
    seen: list[int]
    stored: list[int]
    behind: list[int]
    positions: list[int]

    def __post_init__(self) -> None:
        self.position = max(self.positions, default=0)
        self.num_before = max(self.stored, default=0)
        self.num_visible = self.num_before + self.num_new
        self.is_even = len(set(self.stored)) <= 1
        # Where rotary keys stay as they are, positions run on without meaning; elsewhere they are
        # places.
        turns = self.realigner is not None and self.realigner.rotation and not self.realigner.moves
        self.births = self.stored if turns else self.positions
        self.first_place = self.sizes.num_sinks
        self.places: Tensor | None = None
        if not self.is_even or len(set(self.births)) > 1:
            stored, births = (
                torch.tensor(x, device=self.device)[:, None] for x in (self.stored, self.births)
            )
            rank = torch.arange(self.num_visible, device=self.device) - self.num_before + stored
            self.visible, self.inside = rank >= 0, rank >= self.sizes.num_sinks
            self.places = (rank + births - stored) * self.inside
        elif self.births:
            self.first_place += self.births[0] - self.stored[0]
        self.is_plain = False
        self.behind_rows = torch.tensor(self.behind, device=self.device)[:, None, None]

    @cached_property
    def seen_rows(self) -> Tensor:
        """`seen`, [B, 1, 1] int64, for what has the rows of a batch."""
        return torch.tensor(self.seen, device=self.device)[:, None, None]

    def prepare(self, end: int) -> None:
        """Say all of a plain step, written at `end` of the buffers, before it begins: what its
        layers do is then the same from step to step, and can be compiled.
        """
        self.is_plain, self.end = True, end
        self.birth = slice(self.births[0], self.births[0] + 1)
        self.position_ids = torch.tensor(self.positions, device=self.device)[:, None]  # [B, 1]
        self.at = self.position_ids[:, None]  # [B, 1, 1]
