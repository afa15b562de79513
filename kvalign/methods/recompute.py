"""`recompute`: re-encode the last C + 1 tokens at every step; exact, and slow by a factor that
grows with C.

The oracle of both papers. It keeps no sinks (the paper's protocol); `num_sinks` adds them.
"""

import torch
from torch import Tensor

from kvalign.methods.base import Reencoding


class Recompute(Reencoding):
    name = "recompute"
    about = "re-encodes the window at every step"
    default_num_sinks = 0

    def feed(self, ids: Tensor) -> Tensor:
        self.seen = self.keep(ids if self.seen is None else torch.cat([self.seen, ids], 1))
        return self.forward(self.seen)
