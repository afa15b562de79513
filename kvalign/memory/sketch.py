"""Keys of a memory in few bits, from which our kernel estimates scores.

    entries   | page 0                        | page 1 ...
              | block 0   | block 1   | ...   |             a block: 16 entries whose keys are alike
    numbers   16 entries: [ D / 16 ] x [ 16 entries ] x [ 4 bytes ]   2 bits: 16 numbers of a key
    fine      an entry:   [ D / 16 ] x [ 8 bytes ]                    4 bits: 8 in the low halves,
                          its scale, its slot                        of 2 bytes each

A key less its head's base (`Memory`) is turned, so that its numbers are alike in size, as of a
normal distribution, and rounded to four and to 16 levels. The base adds the same to all scores of a
query, and is added exactly: of the queries that share a head of keys the greatest score counts.

Entries lie as their slots do. Once a window has left a page, its entries are put in order: halved
along their longest axis until a block of 16 is left, whose keys are alike. A search then reads a
mean of each block, and only the blocks whose mean and spread promise most. What lies beside each
other in a text is not alike, so blocks of neighbours would not do (eval/results/memory.md).
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from kvalign.memory.slots import lengthened
from kvalign.models import kernel
from kvalign.models.wrapped import no_autograd_modes

BLOCK = 16
"""Entries whose numbers lie together: a number of each in a register."""
PAGE = 2048
"""Entries that are put in order together."""


@lru_cache(maxsize=4)
@no_autograd_modes()
def turn_of(dim: int) -> Tensor:
    """Rotation [D, D] float32 that spreads what single numbers of a key hold over all of them:
    random signs, then a cosine transform.
    """
    signs = torch.randint(2, (dim, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    number, wave = torch.arange(dim)[:, None] + 0.5, torch.arange(dim)
    lengths = torch.full((dim,), 2 / dim).sqrt()
    lengths[0] = dim**-0.5
    return signs * lengths * (torch.pi / dim * number * wave).cos()


class Sketch:
    """Keys of a memory in few bits.

    Args:
        like: keys of the shape [B, H, ?, D].

    Attributes:
        turn: [D, D] float32.
        numbers: [B, H, S / 16, D / 16, 16, 4] uint8.
        scales: [B, H, S] float16, of these, of each key; those of 4 bits are in proportion.
        fine: [B, H, S, D / 2 + 4] uint8; a slot, int16, counts from its page's first one on.
        means, mean_scales: [B, H, pages, PAGE / 256, D / 16, 16, 4] and [B, H, pages, PAGE / 16],
            as numbers and scales, of the keys of each block of a page that is in order.
        spreads: [B, H, pages, PAGE / 16] float16, a key's distance from there, of one number.
        is_ordered: [B, pages] bool.
    """

    def __init__(self, like: Tensor):
        num_rows, num_heads, _, dim = like.shape
        self.turn = turn_of(dim)

        def empty(*sizes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return like.new_zeros(num_rows, *sizes, dtype=dtype)

        self.numbers = empty(num_heads, 0, dim // 16, BLOCK, 4)
        self.scales = empty(num_heads, 0, dtype=torch.float16)
        self.fine = empty(num_heads, 0, dim // 2 + 4)
        self.means = empty(num_heads, 0, PAGE // BLOCK // 16, dim // 16, BLOCK, 4)
        self.mean_scales = empty(num_heads, 0, PAGE // BLOCK, dtype=torch.float16)
        self.spreads = empty(num_heads, 0, PAGE // BLOCK, dtype=torch.float16)
        self.is_ordered = empty(0, dtype=torch.bool)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        of_entries = self.numbers, self.scales, self.fine
        return *of_entries, self.means, self.mean_scales, self.spreads, self.is_ordered

    def _replace(self, tensors: Sequence[Tensor]) -> None:
        self.numbers, self.scales, self.fine, *of_blocks = tensors
        self.means, self.mean_scales, self.spreads, self.is_ordered = of_blocks

    def write(self, rows: slice, first: int, apart: Tensor, slots: Tensor | None = None) -> None:
        """Write keys less their base, [B, H, T, D], as entries from a first one on: those of these
        slots [B, H, T], or of the slots that are numbered as entries.
        """
        of_entries = self.numbers[rows], self.scales[rows], self.fine[rows]
        kernel.write_sketch(apart, self.turn, *of_entries, first, slots)
        last = first + apart.shape[2] - 1
        self.is_ordered[rows, first // PAGE : last // PAGE + 1] = False

    def order(self, rows: slice, page: int, apart: Tensor) -> None:
        """Put a page in order: its keys less their base, [B, H, PAGE, D], as slots have them."""
        slots = kernel.alike_first(apart.flatten(0, 1)).unflatten(0, apart.shape[:2])
        apart = apart.gather(2, slots[..., None].expand_as(apart))
        self.write(rows, page * PAGE, apart, slots)
        blocks = apart.unflatten(2, (-1, BLOCK))  # [B, H, blocks, 16, D]
        means = blocks.mean(3)
        of_means = self.means[rows], self.mean_scales[rows].flatten(2)
        kernel.write_sketch(means, self.turn, *of_means, None, page * (PAGE // BLOCK))
        spread = (blocks - means[:, :, :, None]).square().mean((3, 4)).sqrt()
        self.spreads[rows, :, page] = spread.clamp_max(65504)
        self.is_ordered[rows, page] = True

    def is_in_order(self, rows: slice, page: int) -> bool:
        """Return whether a page of any of these rows is in order."""
        return page < self.is_ordered.shape[1] and bool(self.is_ordered[rows, page].any())

    def not_in_order(self, rows: slice) -> list[int]:
        """Pages that are not in order in all of these rows."""
        return [i for i, x in enumerate(self.is_ordered[rows].all(0).tolist()) if not x]

    def lengthen(self, num_slots: int) -> None:
        """Have so many slots."""
        num_pages = num_slots // PAGE
        nums = num_slots // BLOCK, num_slots, num_slots, num_pages, num_pages, num_pages
        of_heads = zip(self.tensors[:-1], nums, strict=True)
        longer = [lengthened(x, 2, num, stays_in_ram=True) for x, num in of_heads]
        self._replace([*longer, lengthened(self.is_ordered, 1, num_pages)])

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        self._replace([x[rows] for x in self.tensors])

    @classmethod
    @no_autograd_modes()
    def joined(cls, sketches: Sequence[Self]) -> Self:
        """Sketch of the rows of all these."""
        joined = copy.copy(sketches[0])
        of_all = zip(*(one.tensors for one in sketches), strict=True)
        joined._replace([*map(torch.cat, of_all)])
        return joined
