"""Long prompts: the time to the first token by that of plain passes over the same tokens.

    python tests/scripts/long_prompts.py --num-tokens 240001

A plain pass reads pieces of the cache's size, each without what came before it.
"""

import json
import sys
import time
from dataclasses import dataclass

import torch

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class LongPromptSettings(Settings):
    """Feed one long prompt of random tokens to each method, and to the model in plain passes.

    Example:
        python tests/scripts/long_prompts.py --num-tokens 8000 --cache-size 64
    """

    model: str = option("gpt2-mini", help="shipped name, hub id or folder of a causal LM")
    methods: tuple[str, ...] = option(("streaming-llm", "kvalign"), help="methods, comma-separated")
    num_tokens: int = option(60_001, help="tokens of the prompt", at_least=1)
    cache_size: int = option(255, help="entries of the cache", at_least=5)


@torch.no_grad()
def run(settings: LongPromptSettings) -> None:
    """Print a line for each method and one of JSON, the document."""
    started = time.perf_counter()
    model, size = load_model(settings.model).model, settings.cache_size
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, settings.num_tokens), generator=rng)
    for piece in ids[:, : 2 * size].split(size, 1):  # warm-up
        model(input_ids=piece, use_cache=False, logits_to_keep=1)
    start = time.perf_counter()
    for piece in ids.split(size, 1):
        model(input_ids=piece, use_cache=False, logits_to_keep=1)
    plain, seconds = time.perf_counter() - start, {}
    for name in settings.methods:
        method = make_method(name, model, cache_size=size)
        start = time.perf_counter()
        method.feed(ids)
        seconds[name] = time.perf_counter() - start
        print(
            f"{settings.model} {name}, C = {size}: {settings.num_tokens} tokens in "
            f"{seconds[name]:.1f} s, {seconds[name] / plain:.2f} times plain ({plain:.1f} s)",
            flush=True,
        )
    rows = [{"work": "plain passes", "seconds": plain, "ratio": 1.0}]
    rows += [{"work": f"`{n}`", "seconds": s, "ratio": s / plain} for n, s in seconds.items()]
    print(json.dumps(document("script long-prompts", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(parse(LongPromptSettings, sys.argv[1:], "python tests/scripts/long_prompts.py")[0])
