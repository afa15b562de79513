"""The most memory that work holds at once."""

import gc
import os
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


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
