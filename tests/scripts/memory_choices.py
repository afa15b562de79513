"""What a memory takes back: single entries, as ours does, or blocks of neighbours, as InfLLM and
Quest choose them; beside random eviction and no memory. All see equally many entries.

    python tests/scripts/memory_choices.py --corpus text:test.txt --parts text

Blocks replace what `Memory.find` finds, of the same stored entries: keys without a position, each
KV head for itself, by its query as if the block lay right before the window. Equally many entries
come back, in blocks of `--block-sizes`, and have the same places.

- `blocks-representatives` (InfLLM, arXiv 2402.04617): each block has a quarter of its entries, at
  least one, to represent it: those with the highest mean score by the queries that came while they
  were in the window. A block's worth is the sum of their scores. InfLLM lets all heads of a layer
  choose together; here each KV head does.
- `blocks-bounds` (Quest, arXiv 2406.10774): a block's worth is the highest score that a key within
  the box around its keys could have.
- `score-alone`: blocks of one. So it is ours, but age costs nothing, and repeated text comes back.
- `random`: no memory, any entry of the window may be evicted, sinks are kept (arXiv 2609.03430
  keeps the prompt).
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.needle import needle
from kvalign.eval.evaluations.recall import FAR, recall
from kvalign.eval.evaluations.told import told
from kvalign.eval.protocol import Row
from kvalign.eval.protocol.document import document
from kvalign.eval.protocol.statistics import interval
from kvalign.foundation.settings import Settings, option
from kvalign.memory.memories import Memories
from kvalign.memory.memory import Memory, at, products
from kvalign.memory.recall import Matches, QueryBatch
from kvalign.models.loading import LoadedModel
from kvalign.streaming.scoring import score

PARTS = ("text", "facts", "needles", "told")
FACTS = {"recall-llama": "streaming-llm", "recall-gpt2": "kvalign"}
CHOICES = ("none", "random", "blocks-representatives", "blocks-bounds", "score-alone", "entries")


@dataclass(frozen=True, kw_only=True)
class MemoryChoicesSettings(Settings):
    """Compare ways to choose what a memory takes back."""

    parts: tuple[str, ...] = option(PARTS, help="what is measured", choices=PARTS)
    choices: tuple[str, ...] = option(CHOICES, help="who chooses", choices=CHOICES)
    block_sizes: tuple[int, ...] = option((4,), help="entries of a block, a row each", at_least=1)
    model: str = option("smollm2-135m-instruct", help="model of text, needles and told")
    corpus: str = option(help="text that is scored, and in which needles are hidden")
    cache_size: int = option(256, help="entries of that model's cache", at_least=32)
    distances: tuple[int, ...] = option((4, 16), help="of needles, and talk, in cache sizes")
    num_labels: int = option(2000, help="labels of the text", at_least=1)
    num_streams: int = option(10, help="streams of needles", at_least=1)
    num_conversations: int = option(2, help="conversations, of eight facts each", at_least=1)
    facts_cache_size: int = option(64, help="entries of the cache for facts", at_least=32)
    farthest: int = option(16, help="facts up to so many cache sizes back", at_least=2)
    num_questions: int = option(250, help="questions about facts, each distance", at_least=1)
    memory: int = option(100_000, help="evicted tokens that are kept", at_least=1000)


class Blocks:
    """Choice of the best blocks, as `Memory.find` chooses entries.

    Attributes:
        sums: of each layer, sums of the mean queries of a KV head before each slot's [H, S + 1, D].
    """

    def __init__(self, choice: str, size: int):
        has_some = choice == "blocks-representatives"
        self.worth = self.by_representatives if has_some else self.by_bounds
        self.size = size
        self.sums: dict[int, Tensor] = {}

    def find(self, memory: Memory, queries: Tensor, batch: QueryBatch) -> Matches:
        """What `Memory.find` returns, of the same arguments, for one row."""
        evicted, near = batch.evicted_slots(memory.num_slots), memory.sizes.num_in_sight
        size, num_blocks = self.size, memory.sizes.num_recalled // self.size
        assert len(queries) == 1 and memory.num_used < memory.most and size < near
        keys = memory.entries.keys
        blocks = keys.unflatten(2, (-1, size))  # [1, H, N, size, D]
        self.keep(memory, queries, batch)
        # A block whose newest entries are still in the window gives back the others.
        oldest = evicted.ages(torch.arange(0, memory.num_slots, size))
        worth = self.worth(memory, queries, blocks)
        worth = worth.masked_fill((oldest <= near) | (oldest > evicted.oldest), -torch.inf)
        best = worth.topk(num_blocks, sorted=False).indices  # [1, H, T, num_blocks]
        slots = (best[..., None] * size + torch.arange(size)).flatten(-2)
        ages = evicted.ages(slots)
        visible = (ages > near) & (ages <= evicted.oldest)
        order = ages.masked_fill(~visible, sys.maxsize).argsort(descending=True)
        slots, ages, visible = (x.gather(-1, order) for x in (slots, ages, visible))
        return Matches(memory.entries.map(partial(at, slots=slots)), ages, visible)

    def keep(self, memory: Memory, queries: Tensor, batch: QueryBatch) -> None:
        """Keep the queries of these tokens; those before the first eviction do not search."""
        first = int(batch.seen[0, 0]) - memory.sizes.num_sinks
        new = queries[0].mean(1)[:, max(0, -first) :].cumsum(1)  # [H, T, D], without those of sinks
        first, num = max(0, first), new.shape[1]
        sums = self.sums.get(memory.layer, queries.new_zeros(*queries[0, :, 0, :0].shape))
        missing = max(memory.num_slots, first + num) + 1 - sums.shape[1]
        self.sums[memory.layer] = sums = pad(sums, (0, 0, 0, max(0, missing)))
        sums[:, first + 1 : first + num + 1] = sums[:, first, None] + new

    def by_representatives(self, memory: Memory, queries: Tensor, blocks: Tensor) -> Tensor:
        """Worth of blocks for queries, [1, H, T, N]."""
        sums, size, num = self.sums[memory.layer], self.size, memory.num_slots
        after = sums[:, 1 : num + 1]  # the first query after each entry
        end = pad(sums[:, 1 + memory.sizes.num_in_sight - size :], (0, 0, 0, num))[:, :num]
        while_seen = end - after
        scores = (while_seen * blocks[0].flatten(1, 2)).sum(-1).unflatten(1, (-1, size))
        best = scores.topk(max(1, size // 4)).indices  # [H, N, representatives]
        chosen = blocks[0].gather(2, best[..., None].expand(*best.shape, blocks.shape[-1]))
        return products(queries, chosen.sum(2)[None]).amax(2)

    def by_bounds(self, memory: Memory, queries: Tensor, blocks: Tensor) -> Tensor:
        """The same."""
        low, high = blocks.amin(3), blocks.amax(3)
        bounds = products(queries.clamp_min(0), high) + products(queries.clamp_max(0), low)
        return bounds.amax(2)


@contextmanager
def chosen_by(blocks: Blocks | None) -> Iterator[None]:
    """Memories find what the blocks' choice says, and know which layer's they are."""
    of_layer = Memories._of_layer

    def with_number(memories: Memories, layer) -> Memory:
        memory = of_layer(memories, layer)
        memory.layer = layer.layer_idx
        return memory

    find = Memory.find if blocks is None else lambda *args: blocks.find(*args)
    with patch.object(Memory, "find", find), patch.object(Memories, "_of_layer", with_number):
        yield


def measured(settings: MemoryChoicesSettings, part: str, model: str | LoadedModel, how, first):
    """The rows of a part, with the losses of the `first` choice for those of a text."""
    size, each = settings.cache_size, {name: (value,) for name, value in how.items()}
    common = dict(methods=("streaming-llm",), num_sinks=(4,), cache_sizes=(size,), **each)
    if part == "text":
        num = settings.num_labels + size + 1
        ids = torch.tensor([first_ids(settings.corpus, model.tokenizer, num, "--num-labels")])
        method = make_method("streaming-llm", model.model, cache_size=size, num_sinks=4, **how)
        losses = score(method, ids)
        first.append(losses)
        ratio, (low, high) = (losses - first[0]).double().mean().exp(), interval(losses - first[0])
        row = {"at": "text", "value": float(ratio), "low": low, "high": high}
        row |= {"perplexity": float(losses.double().mean().exp()), "num_labels": len(losses)}
        return [row]
    if part == "needles":
        of = dict(distances=settings.distances, num_streams=settings.num_streams)
        found = needle(corpus=settings.corpus, loaded=model, **of, **common)["rows"]
        return [share(row, "accuracy", f"needles, {row['distance']} C later") for row in found]
    if part == "told":
        of = dict(talk=settings.distances, num_conversations=settings.num_conversations)
        found = told(loaded=model, **of, **common)["rows"]
        return [share(row, "accuracy", f"told, {row['talk']} C of talk") for row in found]
    of = dict(farthest=settings.farthest, num_questions=settings.num_questions, num_streams=8)
    sizes = dict(num_sinks=(0,), cache_sizes=(settings.facts_cache_size,))
    (row,) = recall(model=model, methods=(FACTS[model],), **sizes, **of, **each)["rows"]
    to = {name: f"to {n} C" for n, name in FAR.items() if n <= settings.farthest}
    return [share(row, name, at) for name, at in ({"accuracy": "within C"} | to).items()]


def share(row: Row, name: str, at: str) -> Row:
    ends = {"low": row[f"{name}_low"], "high": row[f"{name}_high"]}
    return {"at": at, "value": row[name], **ends, "num_questions": row["num_questions"]}


def run(settings: MemoryChoicesSettings) -> None:
    """Print a line for each finding and one of JSON, the document."""
    started, rows, first = time.perf_counter(), [], []
    how = {"none": {}, "random": {"policy": "random"}}
    sizes = {"score-alone": (1,)} | {c: settings.block_sizes for c in CHOICES if "blocks" in c}
    asked = [(choice, size) for choice in settings.choices for size in sizes.get(choice, (None,))]
    loaded = load_model(settings.model, dtype="float32")
    models = [(p, model) for p in settings.parts for model in (FACTS if p == "facts" else [loaded])]
    for (part, model), (choice, size) in product(models, asked):
        start, more = time.perf_counter(), how.get(choice, {"memory": settings.memory})
        with chosen_by(size and Blocks(choice, size)):
            found = measured(settings, part, model, more, first)
        about = {"model": model if part == "facts" else settings.model, "part": part}
        about |= {"choice": choice, "block_size": size, "seconds": time.perf_counter() - start}
        for row in found:
            rows.append(about | row)
            ends = f"{row['low']:.3f} to {row['high'] or math.inf:.3f}"
            of = f" of {size}" * bool(size)
            print(
                f"{about['model']}: {choice}{of}, {row['at']}: {row['value']:.3f} ({ends})",
                flush=True,
            )
    print(json.dumps(document("script memory-choices", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        run(parse(MemoryChoicesSettings, sys.argv[1:], "python tests/scripts/memory_choices.py")[0])
