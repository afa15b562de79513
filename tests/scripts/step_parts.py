"""Where the time of a decode step goes: its products, its attention and the rest, eager and
compiled, each the fastest of many, one thread.

    python tests/scripts/step_parts.py --model smollm2-135m-instruct --weights int4 --cache-size 255
"""

import argparse
import functools
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvalign import load_model, make_method
from kvalign.models import kernel
from kvalign.models.packed import PackedLinear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-mini")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--cache-size", type=int, default=255)
    parser.add_argument("--num-steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(args.model, dtype="float32", weights=args.weights).model
    eager, compiled = (
        make_method("streaming-llm", model, cache_size=args.cache_size) for _ in range(2)
    )
    compiled.compile()
    ids = torch.randint(model.config.vocab_size, (1, args.cache_size + 1))
    for method in (eager, compiled):
        for part in (ids, *ids[:, :3].split(1, 1)):
            method.feed(part)
    head = model.get_output_embeddings()
    layers = [x for x in model.modules() if isinstance(x, PackedLinear) and x is not head]
    rows = {x.in_features: torch.randn(1, x.in_features) for x in [head, *layers]}
    entries = [layer.entries.data for layer in eager.cache.attention]
    num_heads = model.config.num_attention_heads
    query = torch.randn(1, num_heads, 1, entries[0].keys.shape[-1])
    attend = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    if kernel.is_here():
        places = torch.arange(args.cache_size + 1)[None]
        attend = functools.partial(kernel.attend, places, scale=1.0)
    parts = {
        "eager step": lambda: eager.feed(ids[:, :1]),
        "compiled step": lambda: compiled.feed(ids[:, :1]),
        "products of the layers": lambda: [x.product(rows[x.in_features]) for x in layers],
        "head": lambda: head.product(rows[head.in_features]),
        "attention": lambda: [attend(query, x.keys, x.values) for x in entries],
    }
    seconds = {name: float("inf") for name in parts}
    with torch.no_grad():
        for _ in range(args.num_steps):
            for name, part in parts.items():
                start = time.perf_counter()
                part()
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    for name, value in seconds.items():
        print(f"{name}: {1e3 * value:.2f} ms")


if __name__ == "__main__":
    main()
