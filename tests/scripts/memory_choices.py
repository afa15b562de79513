"""What a memory takes back, chosen by the rules of other work on the same questions: single
entries, as ours, or blocks of neighbours, as InfLLM and Quest choose them. All see equally many.

    python tests/scripts/memory_choices.py --block-sizes 8,4

A choice replaces what `Memory.find` finds, of the same stored entries: keys without a position,
each KV head for itself, by its query as if the block lay right before the window. Equally many
entries come back, and have the same places. Each question is asked with each choice, so differences
are paired.

- `blocks-representatives` (InfLLM, arXiv 2402.04617): each block has a quarter of its entries, at
  least one, to represent it: those with the highest mean score by the queries that came while they
  were in the window. A block's worth is the sum of their scores. InfLLM lets all heads of a layer
  choose together; here each KV head does.
- `blocks-bounds` (Quest, arXiv 2406.10774): a block's worth is the highest score that a key within
  the box around its keys could have.
- `score-alone`: the entries with the best exact scores, which RetrievalAttention (arXiv 2409.10516)
  looks for. So it is ours, but age costs nothing, and repeated text comes back.
"""

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.data_gen import facts
from kvalign.eval.evaluations.recall import FAR, QUARTERS, signed_losses
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option
from kvalign.foundation.statistics import share_interval
from kvalign.memory.memory import Memory, at, products
from kvalign.memory.recall import Matches, QueryBatch
from kvalign.streaming.scoring import score

METHODS = {"recall-llama": "streaming-llm", "recall-gpt2": "kvalign"}
BLOCKS = ("blocks-representatives", "blocks-bounds")


@dataclass(frozen=True, kw_only=True)
class MemoryChoicesSettings(Settings):
    """Compare rules by which a memory takes entries back.

    Example:
        python tests/scripts/memory_choices.py --num-questions 50
    """

    block_sizes: tuple[int, ...] = option((4,), help="entries of a block, a row each", at_least=2)
    cache_size: int = option(64, help="entries of the cache", at_least=32)
    farthest: int = option(16, help="facts up to so many cache sizes back", at_least=2)
    num_questions: int = option(400, help="questions about facts, each distance", at_least=1)
    memory: int = option(100_000, help="evicted tokens that are kept", at_least=1000)


class Blocks:
    """Choice of the best blocks, as `Memory.find` chooses entries.

    Attributes:
        sums: of each memory, sums of the mean queries of a KV head before each token, [B, H, N, D].
    """

    def __init__(self, choice: str, size: int):
        self.choice, self.size, self.sums = choice, size, dict[int, Tensor]()

    def find(self, memory: Memory, queries: Tensor, batch: QueryBatch) -> Matches:
        """What `Memory.find` returns, of the same arguments."""
        evicted, near = batch.evicted_slots(memory.num_slots), memory.sizes.num_in_sight
        size, num_blocks = self.size, memory.sizes.num_recalled // self.size
        assert memory.num_used < memory.most and size < near
        blocks = memory.entries.keys.unflatten(2, (-1, size))  # [B, H, N, size, D]
        # A block whose newest entries are still in the window gives back the others.
        oldest = evicted.ages(torch.arange(0, memory.num_slots, size))
        if self.choice == "blocks-bounds":
            low, high = blocks.amin(3), blocks.amax(3)
            worth = products(queries.clamp_min(0), high) + products(queries.clamp_max(0), low)
        else:
            worth = products(queries, self.representatives(memory, queries, batch, blocks))
        worth = worth.amax(2).masked_fill((oldest <= near) | (oldest > evicted.oldest), -torch.inf)
        best = worth.topk(num_blocks, sorted=False).indices  # [B, H, T, num_blocks]
        slots = (best[..., None] * size + torch.arange(size)).flatten(-2)
        ages = evicted.ages(slots)
        visible = (ages > near) & (ages <= evicted.oldest)
        order = ages.masked_fill(~visible, sys.maxsize).argsort(descending=True)
        slots, ages, visible = (x.gather(-1, order) for x in (slots, ages, visible))
        return Matches(memory.entries.map(partial(at, slots=slots)), ages, visible)

    def representatives(self, memory: Memory, queries: Tensor, batch: QueryBatch, blocks: Tensor):
        """Sums [B, H, N, D] of the keys that represent each block."""
        first, num, size = int(batch.seen[0, 0]), memory.num_slots, self.size
        mean = queries.mean(2).cumsum(2)
        sums = self.sums.get(id(memory), mean.new_zeros(*mean.shape[:2], 1, mean.shape[3]))
        sums = pad(sums, (0, 0, 0, max(0, first + 1 - sums.shape[2])))
        self.sums[id(memory)] = sums = torch.cat(
            [sums[:, :, : first + 1], sums[:, :, first, None] + mean], 2
        )
        begin = memory.sizes.num_sinks + torch.arange(num)  # of each slot's token
        last, near = sums.shape[2] - 1, memory.sizes.num_in_sight
        end = (begin + near - size).clamp_max(last)
        while_seen = sums[:, :, end] - sums[:, :, (begin + 1).clamp_max(last)]
        scores = (while_seen * blocks.flatten(2, 3)).sum(-1).unflatten(2, (-1, size))
        best = scores.topk(max(1, size // 4)).indices[..., None]  # [B, H, N, representatives, 1]
        return blocks.gather(3, best.expand(*best.shape[:-1], blocks.shape[-1])).sum(3)


def run(settings: MemoryChoicesSettings) -> None:
    """Print a line for each finding and one of JSON, the document."""
    started, rows, size = time.perf_counter(), [], settings.cache_size
    asked = [("none", None), *((c, n) for c in BLOCKS for n in settings.block_sizes)]
    told = dict(num_questions=settings.num_questions, farthest=settings.farthest)
    ids, ages = facts.asked_streams(size, **told, num_streams=8, seed=1)
    ids, ages = torch.from_numpy(ids), torch.from_numpy(ages).flatten()
    is_asked = ages > 0
    parts = [facts.part_of(age, size, settings.farthest) for age in ages[is_asked].tolist()]
    parts = torch.tensor(parts).clamp_min(len(QUARTERS) - 1) - len(QUARTERS) + 1
    names = ["within C", *(f"to {n} C" for n in FAR if n <= settings.farthest)]
    for model, name in METHODS.items():
        ours, loaded = torch.empty(0), load_model(model)
        for choice, block in [("entries", None), ("score-alone", 1), *asked]:
            of = {"memory": settings.memory} if choice != "none" else {}
            method = make_method(name, loaded.model, cache_size=size, num_sinks=0, **of)
            blocks, find = (
                Blocks("blocks-bounds" if block == 1 else choice, block or 0),
                Memory.find,
            )
            chosen = (lambda memory, *of, b=blocks: b.find(memory, *of[:2])) if block else find
            with patch.object(Memory, "find", chosen):
                signed = score(method, ids, lambda _: None, signed_losses, is_asked)
            right = (signed.cpu()[is_asked] >= 0).double()
            ours = right if choice == "entries" else ours
            for i, at_most in enumerate(names):
                found, apart = right[parts == i], (right - ours)[parts == i]
                num, mean = len(found), apart.mean().item()
                reach = 1.96 * (apart.var(correction=0).item() / num) ** 0.5
                low, high = share_interval(found.mean().item(), num)
                row = {"model": model, "choice": choice, "block_size": block, "at": at_most}
                row |= {"value": found.mean().item(), "low": low, "high": high}
                row |= {"apart": mean, "apart_low": mean - reach, "apart_high": mean + reach}
                rows.append(row | {"num_questions": num})
            print(model, choice, block, [round(row["value"], 3) for row in rows[-len(names) :]])
    print(json.dumps(document("script memory-choices", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        run(parse(MemoryChoicesSettings, sys.argv[1:], "python tests/scripts/memory_choices.py")[0])
