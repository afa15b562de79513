"""`random`: any entry is evicted; the baseline for other policies."""

import torch
from torch import Tensor

from kvalign.policies.base import Policy, Seen


class Random(Policy):
    name = "random"
    about = "evicts a random entry, drawn by layer, head and length of the stream"

    def score(self, seen: Seen) -> Tensor:
        _, num_heads, num_entries, _ = seen.keys.shape
        rows = []
        for num_fed in seen.num_fed:
            # Of the row alone: it draws the same in any company and after a restart.
            generator = torch.Generator().manual_seed((num_fed << 12) + seen.layer)
            num_own = min(num_fed, num_entries)
            own = torch.rand(num_heads, num_own, generator=generator, dtype=torch.float32)
            rows.append(torch.nn.functional.pad(own, (num_entries - num_own, 0)))
        return torch.stack(rows).to(seen.keys.device)
