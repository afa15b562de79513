"""Methods on the clock, taking turns: a busy moment of the machine hits all of them.

A trial is one turn of each method, in an order drawn for that trial. What is timed is one call of
`feed`, drawing left out; devices are synchronised before the clock is read.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from kvalign.eval.settings import LatencySettings
from kvalign.methods.base import Method


def time_first(
    methods: Sequence[Method], prompts: Sequence[Tensor], settings: LatencySettings, bar: tqdm
) -> np.ndarray:
    """Seconds from an empty cache to the logits after a whole prompt: [num_methods, num_trials].

    Args:
        methods: of one model.
        prompts: ids [B, T] each; trial i takes prompts[i % len(prompts)].
        settings: num_trials, seed.
        bar: counts turns.
    """
    for method in methods:  # warm-up
        method.reset()
        method.feed(prompts[0])
    seconds = np.empty((len(methods), settings.num_trials))
    for trial in range(settings.num_trials):
        for i in _order(len(methods), trial, settings.seed):
            _show(bar, methods[i])
            methods[i].reset()
            seconds[i, trial] = _clocked(methods[i], prompts[trial % len(prompts)])
            bar.update()
    return seconds


def time_steps(
    methods: Sequence[Method], batch_size: int, settings: LatencySettings, bar: tqdm
) -> np.ndarray:
    """Seconds of each step of one token a stream: [num_methods, num_trials * trial_len].

    Caches are full: whatever a method evicts, realigns or re-encodes is part of its step.

    Args:
        methods: of one model and cache size.
        batch_size: streams at once.
        settings: num_trials, trial_len, seed.
        bar: counts turns.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    for method in methods:
        method.reset()
        for ids in filling(method, batch_size, rng):  # warm-up
            method.feed(ids)
    seconds: list[list[float]] = [[] for _ in methods]
    for trial in range(settings.num_trials):
        for i in _order(len(methods), trial, settings.seed):
            _show(bar, methods[i])
            for _ in range(settings.trial_len):
                seconds[i].append(_clocked(methods[i], random_ids(model, batch_size, 1, rng)))
            bar.update()
    return np.array(seconds)


def filling(method: Method, batch_size: int, rng: torch.Generator) -> list[Tensor]:
    """Random ids that fill a cache and make it evict: [B, cache_size + 1], then [B, 1] thrice."""
    lens = (method.sizes.cache_size + 1, 1, 1, 1)
    return [random_ids(method.model, batch_size, num_tokens, rng) for num_tokens in lens]


def random_ids(
    model: PreTrainedModel, num_rows: int, num_tokens: int, rng: torch.Generator
) -> Tensor:
    """[num_rows, num_tokens] int64 on the model's device."""
    ids = torch.randint(model.config.vocab_size, (num_rows, num_tokens), generator=rng)
    return ids.to(model.device)


def _order(num_methods: int, trial: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, trial)).permutation(num_methods)


def _show(bar: tqdm, method: Method) -> None:
    bar.set_description(f"{method.title} C={method.sizes.cache_size}")


def _clocked(method: Method, ids: Tensor) -> float:
    _synchronise(method.model)
    start = time.perf_counter()
    method.feed(ids)
    _synchronise(method.model)
    return time.perf_counter() - start


def _synchronise(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
