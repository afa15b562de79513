"""Long prompts: the time to the first token by that of plain passes over the same tokens.

    python tests/scripts/long_prompts.py --num-tokens 240001

A plain pass reads pieces of the cache's size, each without what came before it.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from itertools import product

import torch

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class LongPromptSettings(Settings):
    """Feed one long prompt of random tokens to each method, and to the model in plain passes."""

    model: str = option("gpt2-mini", help="shipped name, hub id or folder of a causal LM")
    methods: tuple[str, ...] = option(("streaming-llm", "kvalign"), help="methods, comma-separated")
    memory: tuple[int, ...] = option((0,), help="tokens of a memory, a row each; 0: none")
    num_tokens: int = option(60_001, help="tokens of the prompt", at_least=1)
    cache_size: int = option(255, help="entries of the cache", at_least=5)
    num_turns: int = option(1, help="times that all take turns; the fastest counts", at_least=1)


@torch.no_grad()
def run(settings: LongPromptSettings) -> None:
    """Print a line for each method and one of JSON, the document."""
    started = time.perf_counter()
    model, size = load_model(settings.model, dtype="float32").model, settings.cache_size
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, settings.num_tokens), generator=rng)

    def in_pieces(ids: torch.Tensor) -> None:
        for piece in ids.split(size, 1):
            model(input_ids=piece, use_cache=False, logits_to_keep=1)

    in_pieces(ids[:, : 2 * size])  # warm-up
    ways = {"plain passes": in_pieces}
    for name, memory in product(settings.methods, settings.memory):
        told = {"memory": memory} if memory else {}
        method = make_method(name, model, cache_size=size, **told)
        ways[f"`{name}`" + f", a memory of {memory}" * bool(memory)] = method.feed
    seconds = dict.fromkeys(ways, math.inf)
    for _ in range(settings.num_turns):
        for way, read in ways.items():
            start = time.perf_counter()
            read(ids)
            seconds[way] = min(seconds[way], time.perf_counter() - start)
            if way != "plain passes":
                read.__self__.reset()
    plain = seconds["plain passes"]
    rows = [{"work": way, "seconds": s, "ratio": s / plain} for way, s in seconds.items()]
    for way, s in seconds.items():
        print(f"{way}, C = {size}: {s:.1f} s, {s / plain:.2f} times plain passes", flush=True)
    print(json.dumps(document("script long-prompts", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(parse(LongPromptSettings, sys.argv[1:], "python tests/scripts/long_prompts.py")[0])
