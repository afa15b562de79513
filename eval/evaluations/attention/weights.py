"""Attention weights of a model's layers while a method streams.

transformers' own eager attention computes them. A hook on each layer's attention keeps only those
of the last query, so the full weights of only one layer exist at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.realign import OnRead
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.evaluations.attention import EDGE, AttentionSettings
from kvalign.eval.protocol import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.eval.protocol.statistics import mean_interval
from kvalign.foundation import progress
from kvalign.invariants.stream import by_time
from kvalign.methods.base import Method
from kvalign.methods.cached import Cached
from kvalign.methods.reencoding import Reencoding
from kvalign.models.input_ids import prefix_ids, with_prefix
from kvalign.models.loading import LoadedModel

NUM_MIDDLE = 16  # bins of those between
FEWEST = 2 * EDGE + NUM_MIDDLE  # entries that fill the bins
LOCAL_LAYERS = 2  # the first two of a model look at what is near (Xiao et al. 2024)


def num_tokens(cache_size: int, num_steps: int) -> int:
    """Tokens of a text that `watch` feeds."""
    return 2 * cache_size + 1 + num_steps


def read_texts(loaded: LoadedModel, settings: AttentionSettings) -> Tensor:
    """First pieces of the corpus's test part, as long as the largest cache needs, with the
    tokenizer's opening tokens in place of the first ones: [num_texts, T] int64.

    Raises:
        UserError: the corpus has fewer.
    """
    progress.phase(f"reading {settings.corpus}")
    length = num_tokens(max(settings.cache_sizes), settings.num_steps)
    num_ids, smaller = settings.num_texts * length, "--num-texts or --cache-sizes"
    ids = first_ids(settings.corpus, loaded.tokenizer, num_ids, smaller)
    texts = torch.tensor(ids, device=loaded.model.device).view(-1, length)
    return with_prefix(texts, prefix_ids(loaded.tokenizer))


def watch(
    method: Method, ids: Tensor, num_steps: int, on_steps: Callable[[int], object] = lambda n: None
) -> tuple[Tensor, Tensor]:
    """Feed ids [B, 2 C + 1 + num_steps]. Observe the last steps before any eviction, which end with
    C + 1 entries, and the last of all, when everything but the sinks has been evicted. UserError
    for too many tokens for a method that does not evict.

    Returns:
        Weights before and after: [B, L, H, bins] float64, means over `num_steps` steps of the mean
            weight of an entry in each bin (`in_bins`).
    """
    method = readable(method)
    method.reset()
    size = method.sizes.cache_size
    first, ours, between, last = ids.split([size + 1 - num_steps, num_steps, size, num_steps], 1)
    method.feed(first)
    before = _step(method, ours, on_steps)
    for part in between.split(size if isinstance(method, Reencoding) else 1, 1):
        method.feed(part)
        on_steps(part.shape[1])
    return before, _step(method, last, on_steps)


def _step(method: Method, ids: Tensor, on_steps: Callable[[int], object]) -> Tensor:
    """The mean over steps, one a token of ids [B, T]."""
    total = torch.zeros((), dtype=torch.float64)
    with watched(method.model) as weights:
        for one in ids.split(1, 1):
            method.feed(one)
            total = total + in_bins(_by_time(method, torch.stack(weights, 1)))
            weights.clear()
            on_steps(1)
    return total / ids.shape[1]


def _by_time(method: Method, weights: Tensor) -> Tensor:
    """Weights [B, L, H, S] of the last step in the order of time: a ring is read as it lies."""
    step = method.cache.last_step if isinstance(method, Cached) else None
    if step is None:
        return weights
    slots = weights.flatten(1, 2)[..., None]
    return by_time(step, KV(slots, slots)).keys[..., 0].unflatten(1, weights.shape[1:3])


def in_bins(weights: Tensor) -> Tensor:
    """Weights [..., S], S >= FEWEST, as means over bins [..., FEWEST]: the first and the last
    `EDGE` entries have one bin each, those between share `NUM_MIDDLE` bins of equal width.
    """
    weights = weights.double().cpu()
    middle = weights[..., EDGE:-EDGE].tensor_split(NUM_MIDDLE, -1)
    means = torch.stack([part.mean(-1) for part in middle], -1)
    return torch.cat([weights[..., :EDGE], means, weights[..., -EDGE:]], -1)


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Context in which each pass of the model appends the weights of its last query to the list:
    [B, H, S] a layer.
    """
    config, weights = model.config, list[Tensor]()
    name = config._attn_implementation

    def keep(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        weights.append(output[1][:, :, -1])

    handles = [module.register_forward_hook(keep) for module in attention_of(model)]
    config._attn_implementation = "eager"  # the others return no weights
    try:
        yield weights
    finally:
        config._attn_implementation = name
        for handle in handles:
            handle.remove()


def attention_of(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that return attention's output and weights, one for each layer."""
    named = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    inner = {part for module in named for part in module.modules() if part is not module}
    outer = [module for module in named if module not in inner]  # GPT-Neo has one in another
    assert len(outer) == model.config.num_hidden_layers
    return outer


def readable(method: Method) -> Method:
    """Method whose entries are written where the model's own attention reads them."""
    if isinstance(method, Cached) and isinstance(method.cache.realigner, OnRead):
        method.places_by, method.is_exact = method.cache.realigner.moving, False
        method.reset()
    return method


def row(method: Method, before: Tensor, after: Tensor) -> Row:
    """The row of a method, from weights [B, L, H, bins]."""
    phases = {"before": before, "after": after}
    figures: Row = sizes_of(method)
    for part, bins in {"first": [0], "four": range(EDGE), "latest": range(-EDGE, 0)}.items():
        for phase, weights in phases.items():
            layers = weights[:, LOCAL_LAYERS:] if weights.shape[1] > LOCAL_LAYERS else weights
            shares = 100 * layers[..., list(bins)].sum(-1).mean((1, 2))  # [B]
            low, high = mean_interval(shares)
            name = f"{part}_{phase}"
            figures |= {name: shares.mean().item(), f"{name}_low": low, f"{name}_high": high}
    for phase, weights in phases.items():  # what the pictures show
        mean = 100 * weights.mean(0)  # [L, H, bins]
        by_entry, by_head = mean.mean(1), mean[..., :EDGE].sum(-1)
        figures[phase] = {"by_entry": _short(by_entry), "by_head": _short(by_head)}
    return figures


def _short(shares: Tensor) -> list[list[float]]:
    """Four digits of each: a document holds thousands."""
    return [[float(f"{value:.4g}") for value in line] for line in shares.tolist()]
