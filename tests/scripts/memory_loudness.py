"""How loud what a memory takes back should be, learned per layer and head through the frozen model.

    python tests/scripts/memory_loudness.py --corpus text:valid.txt --judge text:test.txt

A bias and a slope by ln(age / window) are added to the scores of what is taken back. They are
trained to come near to dense attention over the model's context, and judged on other text beside
no memory and a memory as it is.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

import kvalign
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import token_pieces
from kvalign.eval.protocol.statistics import interval
from kvalign.foundation.settings import Settings, option
from kvalign.memory.memory import Memory
from kvalign.memory.recall import Recall, RecalledEntries
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.streaming.scoring import score
from kvalign.training.table_objectives import adam, divergence

NUM_ROWS, SEGMENT, NUM_BEFORE = 4, 256, 1024
"""Streams that are trained on at once, tokens of a step, and tokens before the first."""


@dataclass(frozen=True, kw_only=True)
class MemoryLoudnessSettings(Settings):
    """Learn how loud what a memory takes back should be.

    Example:
        python tests/scripts/memory_loudness.py --corpus text:valid.txt --judge text:test.txt
    """

    model: str = option("gpt2-mini", help="as everywhere")
    method: str = option("kvalign", help="a method that takes a memory")
    corpus: str = option(help="text that is trained on")
    judge: str = option(help="text that is judged on")
    cache_sizes: tuple[int, ...] = option((32, 64, 128), help="caches, in turns")
    num_steps: int = option(90, help="updates", at_least=1)
    num_tokens: int = option(400_000, help="tokens that are trained on, the last of the corpus")
    num_labels: int = option(20_000, help="tokens that are judged")
    memory: int = option(100_000, help="evicted tokens that are kept aside")


@contextmanager
def loudness(bias: Tensor, slope: Tensor) -> Iterator[None]:
    """Within it, segments add these [L, H] to the scores of what they take back."""
    plain, find = Recall.as_seen, torch.no_grad()(Memory.find)

    def as_seen(self, layer, queries, batch, matches) -> RecalledEntries:
        recalled = plain(self, layer, queries, batch, matches)
        ages = (matches.ages.clamp_min(1) / self.places.near).log()  # [B, H, T, R]
        more = bias[layer][:, None, None] + slope[layer][:, None, None] * ages
        return recalled._replace(scores=recalled.scores + more[:, :, None])

    with patch.object(Recall, "as_seen", as_seen), patch.object(Memory, "find", find):
        yield


def trained(loaded, settings: MemoryLoudnessSettings) -> tuple[Tensor, Tensor]:
    """Bias and slope [L, H]."""
    model, spec = loaded.model.requires_grad_(False), loaded.spec
    ids = first_tokens(settings.corpus, loaded, 3 * settings.num_tokens)[-settings.num_tokens :]
    rows = ids[: len(ids) // NUM_ROWS * NUM_ROWS].view(NUM_ROWS, -1)
    sizes = settings.cache_sizes
    parameters = [torch.zeros(spec.num_layers, spec.num_kv_heads) for _ in range(2)]
    optimizer, schedule = adam([x.requires_grad_() for x in parameters], 0.1, settings.num_steps)
    share = NUM_BEFORE + -(-settings.num_steps // len(sizes)) * SEGMENT  # tokens of a cache's row
    if rows.shape[1] <= len(sizes) * share:
        raise kvalign.UserError(f"--corpus has {len(ids)} tokens: give it more, or fewer steps")
    methods = [new(model, size, settings, NUM_BEFORE + SEGMENT) for size in sizes]
    with torch.no_grad():
        for i, method in enumerate(methods):
            method.feed(rows[:, i * share : i * share + NUM_BEFORE])
    with loudness(*parameters):
        for step in range(settings.num_steps):
            i = step % len(sizes)
            start = i * share + NUM_BEFORE + step // len(sizes) * SEGMENT
            now = rows[:, start : start + SEGMENT]
            with torch.no_grad():
                seen = rows[:, start + SEGMENT - spec.context_len : start + SEGMENT]
                teacher = model(input_ids=seen, use_cache=False, logits_to_keep=SEGMENT).logits
            logits = methods[i].cache.feed_segment(model, now)
            loss = divergence(teacher.float().flatten(0, 1), logits.float().flatten(0, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 15 == 14:
                print(f"step {step + 1}: {loss.item():.4f}", file=sys.stderr)
    bias, slope = (x.detach() for x in parameters)
    return bias, slope


def new(model, cache_size: int, settings: MemoryLoudnessSettings, memory: int) -> Method:
    return make_method(settings.method, model, cache_size=cache_size, memory=memory, warn=False)


def first_tokens(corpus: str, loaded, num: int) -> Tensor:
    """[T] int64, at most so many."""
    ids: list[int] = []
    for piece in token_pieces(corpus, loaded.tokenizer):
        ids += piece
        if len(ids) >= num:
            break
    return torch.tensor(ids[:num])


def run(settings: MemoryLoudnessSettings) -> int:
    """Print what was learned, and a line of JSON a cache size and variant."""
    loaded = kvalign.load_model(settings.model)
    bias, slope = trained(loaded, settings)
    print(json.dumps({"bias": bias.tolist(), "slope": slope.tolist()}))
    variants = {
        "no memory": None,
        "as it is": (0 * bias, 0 * slope),
        "learned": (bias, slope),
    }
    for size in settings.cache_sizes:
        ids = first_tokens(settings.judge, loaded, size + 1 + settings.num_labels)[None]
        losses: dict[str, Tensor] = {}
        for name, parameters in variants.items():
            if parameters is None:
                losses[name] = score(new(loaded.model, size, settings, 0), ids)
            else:
                with loudness(*parameters):
                    losses[name] = score(new(loaded.model, size, settings, settings.memory), ids)
            apart = losses[name] - losses.get("as it is", losses[name])
            row = {"cache_size": size, "variant": name}
            row |= {"perplexity": losses[name].mean().exp().item()}
            if "as it is" in losses:
                row |= {"by as it is": apart.mean().exp().item(), "interval": interval(apart)}
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = "python tests/scripts/memory_loudness.py"
    sys.exit(run(parse(MemoryLoudnessSettings, sys.argv[1:], words)[0]))
