"""The share of the best entries of a memory that our kernel's search finds, and of their weight, by
layer and head, against an exact search.

    python tests/scripts/found.py --text wikitext-2/test.txt --num-tokens 6144
"""

import argparse
from collections import defaultdict
from pathlib import Path

import torch

from kvalign.memory.memory import Memory
from kvalign.methods import make_method
from kvalign.models.loading import load_model

NUM_ASKING = 256  # tokens, the last ones


def main(args: argparse.Namespace) -> None:
    torch.set_grad_enabled(False)
    loaded, find = load_model(args.model, dtype="float32"), Memory.find
    ids = loaded.tokenizer(
        args.text.read_text()[: 8 * args.num_tokens], return_tensors="pt"
    ).input_ids
    ids = ids[:, : args.num_tokens]
    of_cache = dict(cache_size=args.cache_size, num_sinks=4, memory=args.num_tokens, warn=False)
    method = make_method(args.method, loaded.model, **of_cache)
    shares: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    layers: dict[int, int] = {}

    def compared(self: Memory, queries, batch):
        found = find(self, queries, batch)
        sketch, self.sketch = self.sketch, None
        expected = find(self, queries, batch)
        self.sketch = sketch
        layer = layers.setdefault(id(self), len(layers))
        keys = expected.entries.keys  # [B, H, T, R, D]
        scores = (queries.transpose(2, 3) @ keys.mT).amax(
            -2
        ).exp() * expected.visible  # [B, H, T, R]
        is_found = (expected.ages[..., None] == found.ages[..., None, :]).any(-1)
        for head in range(keys.shape[1]):
            one = is_found[:, head].float(), scores[:, head]
            share = one[0][expected.visible[:, head]].mean()
            shares[layer, head] += [(share.item(), ((one[0] * one[1]).sum() / one[1].sum()).item())]
        return found

    method.feed(ids[:, :-NUM_ASKING])
    method.cache.memory.watched = []  # so that entries are asked for
    Memory.find = compared  # type: ignore[method-assign]
    method.feed(ids[:, -NUM_ASKING:])
    means = {where: torch.tensor(x).mean(0).tolist() for where, x in shares.items()}
    for layer in sorted({where[0] for where in means}):
        of_heads = [f"{x:.4f} {y:.4f}" for (i, _), (x, y) in means.items() if i == layer]
        print(f"layer {layer}: found, weight: {'; '.join(of_heads)}")
    mean, worst = (
        torch.tensor([*means.values()]).mean(0).tolist(),
        min(means, key=means.__getitem__),
    )
    print(
        f"mean: {mean[0]:.4f}, weight {mean[1]:.4f}; the worst: layer {worst[0]}, head {worst[1]}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--method", default="streaming-llm")
    parser.add_argument("--cache-size", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=6144)
    main(parser.parse_args())
