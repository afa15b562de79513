"""Methods on the clock, taking turns: a busy moment of the machine hits all of them.

A trial is one turn of each method, in an order drawn for that trial. What is timed is one call of
`feed`, drawing left out; devices are synchronised before the clock is read. The most memory that
they hold is measured apart.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from kvalign.eval.evaluation import Row
from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.grid import sizes_of, title_of
from kvalign.methods.base import Method


def measure(
    methods: list[Method],
    prompts: list[Tensor],
    batch_size: int,
    settings: LatencySettings,
    bar: tqdm,
) -> list[Row]:
    """A row for each method, at one cache size and one batch size; `bar` counts turns."""
    first = time_first(methods, [ids.repeat(batch_size, 1) for ids in prompts], settings, bar)
    steps = time_steps(methods, batch_size, settings, bar)
    per_token = 1e3 / batch_size * steps  # ms
    medians = np.median(per_token, 1)
    base = medians[[method.name for method in methods].index(settings.reference)]
    return [
        {
            **sizes_of(method),
            "batch_size": batch_size,
            "num_steps": len(times),
            "ttft_ms": 1e3 * np.median(to_first),
            "median_ms": median,
            "mean_ms": times.mean(),
            "p90_ms": np.quantile(times, 0.9),
            "p99_ms": np.quantile(times, 0.99),
            "ratio": median / base,
            "peak_mb": _peak_mb(method, batch_size, settings.seed, bar),
        }
        for method, to_first, times, median in zip(methods, first, per_token, medians, strict=True)
    ]


def time_first(
    methods: Sequence[Method], prompts: Sequence[Tensor], settings: LatencySettings, bar: tqdm
) -> np.ndarray:
    """Seconds from an empty cache to the logits after a whole prompt, ids [B, T] each, of which
    trial i takes prompts[i % len(prompts)]: [num_methods, num_trials].
    """
    for method in methods:  # warm-up
        method.reset()
        method.feed(prompts[0])
    seconds = np.empty((len(methods), settings.num_trials))
    for trial, i in _turns(methods, settings, bar):
        methods[i].reset()
        seconds[i, trial] = _clocked(methods[i], prompts[trial % len(prompts)])
    return seconds


def time_steps(
    methods: Sequence[Method], batch_size: int, settings: LatencySettings, bar: tqdm
) -> np.ndarray:
    """Seconds of each step of one token a stream: [num_methods, num_trials * trial_len].

    Caches are full: whatever a method evicts, realigns or re-encodes is part of its step.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    for method in methods:
        method.reset()
        for ids in filling(method, batch_size, rng):  # warm-up
            method.feed(ids)
    seconds: list[list[float]] = [[] for _ in methods]
    for _, i in _turns(methods, settings, bar):
        for _ in range(settings.trial_len):
            seconds[i].append(_clocked(methods[i], random_ids(model, batch_size, 1, rng)))
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


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """Bytes of tensors held at once while `work` runs, beyond those held before.

    CUDA's allocator keeps that count. The CPU's keeps none: there the profiler tells of every
    allocation (+) and release (-), and the peak is that of their running sum.

    Returns:
        At least 0; None on any other device, where `work` is not called.
    """
    gc.collect()  # what is released in the meantime would be taken off the peak
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to stderr at each start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    assert trace.profiler is not None
    assert trace.profiler.kineto_results is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes, initial=0))


def _peak_mb(method: Method, batch_size: int, seed: int, bar: tqdm) -> float | None:
    """Most memory held while an empty cache fills and evicts, in 10^6 bytes; leaves it empty."""
    inputs = filling(method, batch_size, torch.Generator().manual_seed(seed))

    def work() -> None:
        for ids in inputs:
            method.feed(ids)

    method.reset()
    peak = peak_bytes(method.model.device, work)
    method.reset()
    bar.update()
    return None if peak is None else peak / 1e6


def _turns(
    methods: Sequence[Method], settings: LatencySettings, bar: tqdm
) -> Iterator[tuple[int, int]]:
    """Trial and index of the method whose turn it is."""
    for trial in range(settings.num_trials):
        for i in np.random.default_rng((settings.seed, trial)).permutation(len(methods)):
            bar.set_description(title_of(methods[i]))
            yield trial, i
            bar.update()


def _clocked(method: Method, ids: Tensor) -> float:
    _synchronise(method.model)
    start = time.perf_counter()
    method.feed(ids)
    _synchronise(method.model)
    return time.perf_counter() - start


def _synchronise(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
