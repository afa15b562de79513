"""Perplexity of streaming methods, by one protocol for all.

    ids     0 1 ... C | C+1 C+2 ... C+num_tokens
            first input  labels, one at a time

exp(mean NLL) over the labels; at one cache size every method is scored on the same ones. A method
scores a text by stepping; where it re-encodes clean windows anyway (`recompute`, `discard-half`) it
takes a batch of windows at once, with the same result, so `seconds` is the harness's time and no
measure of a method's speed: `kvalign eval compare` measures that.
"""

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from tqdm.auto import tqdm

from kvalign.commands.eval_perplexity import PerplexitySettings
from kvalign.data_gen.corpora import token_pieces
from kvalign.eval.environment import environment
from kvalign.methods import Method, make_methods, method_class
from kvalign.models import LoadedModel, load_model

log = logging.getLogger(__name__)


def evaluate(settings: PerplexitySettings) -> dict[str, Any]:
    """Score every method at every cache size.

    Returns:
        `settings`, `environment` and `rows`: a dict each with method, cache_size, num_sinks,
        num_evicted, num_labels, nll_nats (mean a label), perplexity, seconds, aligner
        (its kind; None for methods without one).

    Raises:
        ValueError: wrong settings, or a corpus shorter than the largest cache and the labels;
            before any work.
    """
    for name in settings.methods:
        method_class(name)
    loaded = load_model(settings.model, settings.device, settings.dtype)
    methods = [
        method
        for cache_size in settings.cache_sizes
        for method in make_methods(
            settings.methods,
            loaded.model,
            aligners=settings.aligner,
            cache_size=cache_size,
            num_sinks=settings.num_sinks,
            num_evicted=settings.num_evicted,
        )
    ]
    longest = max(settings.cache_sizes) + 1 + settings.num_tokens
    ids = read_ids(loaded, settings.corpus, longest)
    return {
        "settings": settings.as_dict(),
        "environment": environment(settings.device),
        "rows": score(methods, ids, settings.num_tokens),
    }


def read_ids(loaded: LoadedModel, corpus: str, num_ids: int) -> torch.Tensor:
    """The first tokens of a corpus's test part: [1, num_ids] int64 on the model's device."""
    ids: list[int] = []
    for piece in token_pieces(corpus, loaded.tokenizer, "test"):
        ids += piece
        if len(ids) >= num_ids:
            return torch.tensor([ids[:num_ids]], device=loaded.model.device)
    raise ValueError(
        f"corpus {corpus!r} has {len(ids)} tokens, {num_ids} are needed: lower --num-tokens"
    )


def score(methods: Iterable[Method], ids: torch.Tensor, num_labels: int) -> list[dict[str, Any]]:
    """Rows of `evaluate` for methods that are ready, on ids [1, N]."""
    methods = list(methods)
    rows = []
    with tqdm(total=len(methods) * num_labels, unit="label", smoothing=0.05) as bar:
        for method in methods:
            bar.set_description(f"{method.name} C={method.cache_size}")
            start = time.perf_counter()
            nll = method.score(ids[:, : method.cache_size + 1 + num_labels], bar.update)
            mean = nll.double().mean().item()
            rows.append(
                {
                    "method": method.name,
                    "cache_size": method.cache_size,
                    "num_sinks": method.num_sinks,
                    "num_evicted": method.num_evicted,
                    "num_labels": len(nll),
                    "nll_nats": mean,
                    "perplexity": math.exp(mean),
                    "seconds": time.perf_counter() - start,
                    "aligner": method.aligner_name,
                }
            )
    return rows
