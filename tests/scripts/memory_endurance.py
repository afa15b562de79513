"""Endurance of a memory: a million random tokens through a model of one layer, by segments.

    python tests/scripts/memory_endurance.py --num-tokens 1000000 --memory 100000

From where the memory is full the process does not grow. What is taken back is old and new, never
older than the memory is long, and is what its own token says: in the first layer an entry without
its position depends on the token alone, so it can be computed again.
"""

import gc
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.tiny_models import tiny_model

from kvalign.app.cli.arguments import parse
from kvalign.cache.segments import SEGMENT_LEN
from kvalign.foundation.settings import Settings, option
from kvalign.methods import make_method

VOCAB_SIZE = 50_000  # few tokens come twice while they are remembered
SHAPE = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
SHAPE |= dict(hidden_size=32, intermediate_size=32)
SIZES = dict(cache_size=63, num_sinks=4)


@dataclass(frozen=True, kw_only=True)
class MemoryEnduranceSettings(Settings):
    """Stream random tokens past the end of a memory, many times over."""

    num_tokens: int = option(1_000_000, help="tokens of the stream", at_least=4 * SEGMENT_LEN)
    memory: int = option(100_000, help="evicted tokens that are kept aside", at_least=SEGMENT_LEN)
    max_slope: float = option(
        100.0, help="bytes that the process may grow per 1000 tokens, once it is full", above=0
    )


def run(settings: MemoryEnduranceSettings) -> int:
    """Print a line of JSON; 1 if anything is off, else 0."""
    found = endure(settings.num_tokens, settings.memory)
    found["faults"] = faults(found, settings)
    print(json.dumps({"settings": settings.as_dict()} | found))
    return 1 if found["faults"] else 0


@torch.no_grad()
def endure(num_tokens: int, memory: int) -> dict:
    """Stream about `num_tokens`; what was measured, by name."""
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, **SHAPE)
    model.model.layers[0].self_attn.q_proj.weight.mul_(100)  # scores that outweigh their ages
    method = make_method("streaming-llm", model, memory=memory, **SIZES)
    rng, gone = torch.Generator().manual_seed(4), Gone(model, method, memory)
    num_nan, seen, rss, at = 0, 1, [], []
    gc.freeze()  # what was there before is not looked at ten times
    for i in range(num_tokens // SEGMENT_LEN):
        ids = torch.randint(2, VOCAB_SIZE, (1, SEGMENT_LEN), generator=rng)
        gone.ids = torch.cat([gone.ids, ids], 1)[:, -gone.num_ids :]
        num_nan += int((~method.feed_segment(ids, logits_to_keep=1).isfinite()).sum())
        seen += SEGMENT_LEN
        if seen > memory + 4 * SEGMENT_LEN and i % 8 == 0:
            gc.collect()
            rss.append(rss_bytes())
            at.append(seen)
    held = method.cache.memory.of[0].entries
    num_nan += sum(int((~x.isfinite()).sum()) for x in held)
    found = dict(num_tokens=seen, slots=held.keys.shape[2], num_nan=num_nan)
    found["rss_mib"] = [round(rss[i] / 2**20, 2) for i in (0, len(rss) // 2, -1)]
    found["bytes_per_1000_tokens"] = 1000 * float(np.polyfit(at, rss, 1)[0])
    found |= dict(oldest=gone.oldest, oldest_held=memory + method.sizes.num_in_sight)
    return found | dict(num_taken=gone.num_taken, num_other=gone.num_other)


class Gone:
    """Looks at what a method takes back of its first layer.

    Attributes:
        ids: [1, N], the newest tokens.
        oldest: age of the oldest that was taken back.
        num_taken: entries that were.
        num_other: those that were not their token's own.
    """

    def __init__(self, model, method, memory: int):
        self.model, self.method = model, method
        self.num_ids = memory + 4 * SEGMENT_LEN
        self.ids = torch.zeros(1, 0, dtype=torch.int64)
        self.oldest = self.num_taken = self.num_other = 0
        method.feed_segment(torch.zeros(1, 1, dtype=torch.int64))  # and there is a memory
        self.ids = torch.zeros(1, 1, dtype=torch.int64)
        self.memory = method.cache.memory.of[0]
        self.find, self.memory.find = self.memory.find, self.look

    def look(self, queries: Tensor, asking):
        found = self.find(queries, asking)
        ages, is_seen = found.ages[0, 0], found.visible[0, 0]  # [T, R]
        # The segment is among the ids.
        num_after = self.method.cache.seen[0] + SEGMENT_LEN - asking.seen[0]
        places = self.ids.shape[1] - num_after[:, None] - ages
        values = self._values(self.ids[0, places[is_seen]])
        apart = (values - found.entries.values[0, 0][is_seen]).abs().amax(-1)
        self.oldest = max(self.oldest, int(ages[is_seen].max()) if is_seen.any() else 0)
        self.num_taken += len(apart)
        self.num_other += int((apart > 1e-4).sum())
        return found

    def _values(self, ids: Tensor) -> Tensor:
        layer = self.model.model.layers[0]
        hidden = layer.input_layernorm(self.model.model.embed_tokens(ids))
        return layer.self_attn.v_proj(hidden)


def rss_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def faults(found: dict, settings: MemoryEnduranceSettings) -> list[str]:
    """What is off; nothing if the memory is sound."""
    limits = dict(num_nan=0, num_other=0, bytes_per_1000_tokens=settings.max_slope)
    limits |= dict(oldest=found["oldest_held"], slots=settings.memory + 2 * SEGMENT_LEN)
    over = [f"{name} above {limit}" for name, limit in limits.items() if not found[name] <= limit]
    if found["oldest"] < 0.9 * settings.memory:
        over.append("nothing old is taken back")
    return over


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = "python tests/scripts/memory_endurance.py"
    sys.exit(run(parse(MemoryEnduranceSettings, sys.argv[1:], words)[0]))
