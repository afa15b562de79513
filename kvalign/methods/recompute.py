"""`recompute`: re-encode the last C + 1 tokens at every step. It is exact, and slower by a factor
that grows with C.

Both papers use it as the reference. It keeps no sinks (the paper's protocol); `num_sinks` adds
them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalign.methods.reencoding import Reencoding


class Recompute(Reencoding):
    name = "recompute"
    about = "re-encodes the window at every step"
    default_num_sinks = 0

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Read ids. Shorter rows are padded on the right, where no counted token looks."""
        rows = [self.keep(row) for row in self.extend(ids)]
        lens = torch.tensor([len(row) for row in rows], device=ids.device)
        ends, which = lens.unique(return_inverse=True)
        padded = pad_sequence(rows, batch_first=True)
        last = 1 if len(ends) == 1 else ends - 1
        is_full = len(ends) == 1 and padded.shape[1] == self.sizes.first_input_len
        # It has no steps of a cache: what it compiles is the model.
        model: Any = self.stepper if self.stepper is not None and is_full else self.model
        with self.in_eval_mode():
            logits = model(input_ids=padded, use_cache=False, logits_to_keep=last).logits
        logits = logits[torch.arange(len(rows)), which].float()
        self.rows = rows
        return logits
