"""What one forward pass adds to a cache, and where: the same for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvalign.realign import Realigner
from kvalign.sizes import CacheSizes


@dataclass
class Step:
    """One forward pass.

    Attributes:
        seen: tokens of each row before.
        stored: entries of each row before.
        behind: by how much each row's positions have run on.
        positions: where each row's first new token is computed.
    """

    sizes: CacheSizes
    realigner: Realigner | None
    num_new: int
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
            missing = self.num_visible - self.num_new - torch.tensor(self.stored)
            rank = torch.arange(self.num_visible) - missing[:, None]
            run_on = torch.tensor(self.births) - torch.tensor(self.stored)
            self.visible, self.inside = rank >= 0, rank >= self.sizes.num_sinks
            self.places = (rank + run_on[:, None]) * self.inside
        elif self.births:
            self.first_place += self.births[0] - self.stored[0]
        self.is_plain = False
        self.run_on = torch.tensor(self.behind)[:, None, None]  # [B, 1, 1]

    def prepare(self, end: int, device: torch.device) -> None:
        """Say all of a plain step, one token of rows alike beyond the sinks, before it begins: what
        its layers do is then the same from step to step, and can be compiled.
        """
        self.is_plain, self.end = True, end
        self.birth = slice(self.births[0], self.births[0] + 1)
        self.position_ids = torch.tensor(self.positions, device=device)[:, None]  # [B, 1]
        self.at = self.position_ids[:, None]  # [B, 1, 1]
        self.run_on = torch.tensor(self.behind, device=device)[:, None, None]

    def per_row(self, numbers: list[int]) -> int | Tensor:
        """One number if all rows have the same, else [B, 1, 1]."""
        return numbers[0] if len(set(numbers)) == 1 else torch.tensor(numbers)[:, None, None]
