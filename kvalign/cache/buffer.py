"""A sliding buffer: entries in the order of time, written once and read as one slice.

    [ . . . 5 6 7 8 9 . . . ]     appended at `end`, dropped by reading fewer of them
            ^ view    ^ end

When `end` meets the buffer's end, what is kept moves to its start: a copy of C entries every C / 4
steps instead of one at each.
"""

from torch import Tensor


class SlidingBuffer:
    """Entries [B, H, S, D] appended at the end; the owner says how many of the last still count.

    Args:
        most: entries that are read at once, at most; `slack` more fit before anything is copied.
    """

    data: Tensor

    def __init__(self, most: int, slack: int):
        self.size, self.end = most + slack, 0

    def last(self, num: int) -> Tensor:
        """A view of the newest entries [B, H, num, D]."""
        return self.data.narrow(2, self.end - num, num)

    def make_room(self, num_kept: int, num_new: int, like: Tensor) -> None:
        """See to it that `num_new` more fit after the `num_kept` last ones. A buffer that is not
        there yet is made for entries like `like` [B, H, ?, D].
        """
        if self.end == 0:
            length = min(self.size, max(2 * num_new, 64))
            self.data = like.new_empty(*like.shape[:2], max(length, num_new), like.shape[3])
        elif self.end + num_new > self.data.shape[2]:
            self._compact(num_kept, num_new)

    def write(self, new: Tensor) -> None:
        """Put new entries [B, H, T, D] after the last; there is room."""
        self.data.narrow(2, self.end, new.shape[2]).copy_(new)
        self.end += new.shape[2]

    def replace(self, entries: Tensor) -> None:
        """Hold these entries [B, H, S, D] alone."""
        shape = (*entries.shape[:2], max(entries.shape[2], 1), entries.shape[3])
        self.data, self.end = entries.new_empty(shape), 0
        self.write(entries)

    def _compact(self, num_kept: int, num_new: int) -> None:
        old, needed = self.data, num_kept + num_new
        first = self.end - num_kept
        if old.shape[2] < self.size or needed > old.shape[2]:
            length = max(needed, min(self.size, 2 * needed))
            self.data = old.new_empty(*old.shape[:2], length, old.shape[3])
            self.data[:, :, :num_kept] = old[:, :, first : self.end]
        elif first:
            # In pieces that do not overlap with where they go: no second buffer.
            for start in range(0, num_kept, first):
                piece = min(first, num_kept - start)
                old[:, :, start : start + piece] = old[:, :, first + start : first + start + piece]
        self.end = num_kept

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.data = self.data[rows.to(self.data.device)]
