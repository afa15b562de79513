"""Rows of `kvalign eval latency`: every method and the bare step, by the clock and by memory."""

import gc
import os
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvalign.eval.evaluations.latency import LatencySettings, timing
from kvalign.eval.evaluations.latency.bare_step import BareStep
from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.foundation.progress import Bar
from kvalign.methods.base import Method


def num_turns(settings: LatencySettings, num_methods: int) -> int:
    """Turns that `measure` counts for so many methods: first tokens, others, memory."""
    per_trial = 1 + timing.num_rounds(settings) if settings.generate else 2
    num_rows = (num_methods + len(set(settings.cache_sizes))) * len(settings.batch_sizes)
    return num_rows * (settings.num_trials * per_trial + 1)


def measure(
    methods: list[Method],
    prompts: list[Tensor],
    batch_size: int,
    settings: LatencySettings,
    bar: Bar,
) -> list[Row]:
    """A row for the bare step and one for each method, at one cache size and one batch size."""
    reference = 1 + [method.name for method in methods].index(settings.reference)
    methods = [BareStep(methods[0].model, methods[0].sizes.cache_size), *methods]
    inputs = [ids.repeat(batch_size, 1) for ids in prompts]
    if settings.generate:
        first, steps = timing.time_generation(methods, inputs, settings, bar)
    else:
        first = timing.time_first(methods, inputs, settings, bar)
        steps = timing.time_steps(methods, batch_size, settings, bar)
    per_token = [1e3 / batch_size * np.array(seconds) for seconds in steps]  # ms
    means = [times.mean() for times in per_token]
    medians = [np.median(times) for times in per_token]
    return [
        {
            **sizes_of(method),
            "batch_size": batch_size,
            "num_steps": len(times),
            "mean_ms": mean,
            "median_ms": median,
            "p90_ms": np.quantile(times, 0.9),
            "p99_ms": np.quantile(times, 0.99),
            "max_ms": times.max(),
            "ratio": mean / means[reference],
            "bare_mean_ratio": mean / means[0],
            "bare_ratio": median / medians[0],
            "tokens_per_s": 1e3 / mean,
            "ttft_ms": 1e3 * np.median(to_first),
            "peak_mb": _peak_mb(method, batch_size, settings.seed, bar),
        }
        for method, to_first, times, mean, median in zip(
            methods, first, per_token, means, medians, strict=True
        )
    ]


def _peak_mb(method: Method, batch_size: int, seed: int, bar: Bar) -> float | None:
    """Most memory held while an empty cache fills and evicts, in 10^6 bytes; leaves it empty."""
    inputs = timing.filling(method, batch_size, torch.Generator().manual_seed(seed))

    def work() -> None:
        for ids in inputs:
            method.feed(ids)

    method.reset()
    peak = peak_bytes(method.model.device, work)
    method.reset()
    bar.update(1)
    return None if peak is None else peak / 1e6


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """Bytes of tensors held at once while `work` runs, beyond those held before; None on a device
    that does not tell, where `work` is not called.

    CUDA's allocator keeps that count. The CPU's keeps none: there the profiler tells of every
    allocation (+) and release (-), and the peak is that of their running sum.
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
    assert trace.profiler
    assert trace.profiler.kineto_results
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes, initial=0))
