"""Rows of `kvalign eval latency`. Methods take turns, so that a busy moment of the machine affects
all of them: a round is one turn of each, in a random order.

Prompts and the steps of full caches are timed apart, and memory apart from time. In the paper's
protocol, `stream_tokens` is timed from a prompt on, including draws and a filling cache.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvalign.aligners.entries import KV
from kvalign.cache.sizes import OF_MEMORY
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.cache.window_layer import WindowLayer
from kvalign.eval.evaluations.latency.settings import LatencySettings
from kvalign.eval.evaluations.latency.subjects import BareStep, random_ids
from kvalign.eval.protocol.data import Row
from kvalign.eval.protocol.document import environment
from kvalign.eval.protocol.grid import sizes_of, title_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import wait_for
from kvalign.foundation.progress import Bar
from kvalign.memory.memories import Memories
from kvalign.methods.base import Method
from kvalign.models.identity import identity
from kvalign.streaming.loop import stream_tokens
from kvalign.streaming.sampling import Sampling

SAMPLING = Sampling(top_k=20)  # the paper's

Seconds = list[list[float]]
"""Of each method."""

Turns = list[list[list[float]]]
"""Seconds of the steps of each turn, of each method."""


def num_turns(settings: LatencySettings, num_methods: int) -> int:
    """Number of turns in `measure` for so many methods: first tokens, others, memory."""
    per_trial = 1 + math.ceil(settings.generate / settings.trial_len) if settings.generate else 2
    num_rows = (num_methods + len(set(settings.cache_sizes))) * len(settings.batch_sizes)
    return num_rows * (settings.num_trials * per_trial + 1)


def measure(
    methods: list[Method],
    prompts: list[Tensor],
    batch_size: int,
    settings: LatencySettings,
    bar: Bar,
) -> list[Row]:
    """Row for the bare step and one for each method, at one cache size and one batch size."""
    model = methods[0].model
    compiled = settings.compile and model.device.type == "cuda"  # as the methods are
    captured = settings.captured or compiled
    bare_step = BareStep(model, methods[0].sizes.cache_size, compiled, captured)
    methods = [bare_step, *methods]
    inputs = [ids.repeat(batch_size, 1) for ids in prompts]
    if settings.generate:
        first, turns = time_generation(methods, inputs, settings, bar)
    else:
        first = time_first(methods, inputs, settings, bar)
        turns = time_steps(methods, batch_size, settings, bar)
    rows = rows_of(methods, first, turns, batch_size, settings)
    for row, method in zip(rows, methods, strict=True):
        row["peak_mb"] = _peak_mb(method, batch_size, settings.seed, bar)
    return rows


def rows_of(
    methods: Sequence[Method],
    first: Seconds,
    turns: Turns,
    batch_size: int,
    settings: LatencySettings,
) -> list[Row]:
    """Rows of times; the first method is the bare step."""
    reference = [method.name for method in methods].index(settings.reference)
    per_token = [1e3 / batch_size * np.concatenate(of_method) for of_method in turns]  # ms
    means = [times.mean() for times in per_token]
    of_memories = _of_memories(methods, means, batch_size, settings)
    rows = []
    for i, (method, times) in enumerate(zip(methods, per_token, strict=True)):
        figures = {
            "batch_size": batch_size,
            "num_steps": len(times),
            "mean_ms": means[i],
            "median_ms": np.median(times),
            "p90_ms": np.quantile(times, 0.9),
            "p99_ms": np.quantile(times, 0.99),
            "max_ms": times.max(),
            "slowest_ms": 1e3 / batch_size * slowest(turns[i]),
            "ratio": means[i] / means[reference],
            "bare_mean_ratio": means[i] / means[0],
            "bare_ratio": np.median(times) / np.median(per_token[0]),
            "tokens_per_s": 1e3 / means[i],
            "ttft_ms": 1e3 * np.median(first[i]),
        }
        rows.append(sizes_of(method) | figures | of_memories[i])
    return rows


def slowest(turns: Sequence[Sequence[float]]) -> float:
    """The slowest step of a turn, the median over turns: what a stream waits for again and again,
    as for a refill, not what happened once.
    """
    return float(np.median([max(turn) for turn in turns]))


def part_key(
    methods: list[Method], prompts: list[Tensor], batch_size: int, settings: LatencySettings
) -> dict[str, Any]:
    """Everything that the rows of one cache size and batch size depend on, the machine, too."""
    device = methods[0].model.device
    others = ("cache_sizes", "batch_sizes", "out", "csv", "plot", "keep")
    machine = environment(str(device))
    machine.pop("load", None)  # which is of a moment
    return {
        "settings": {name: x for name, x in settings.as_dict().items() if name not in others},
        "methods": [sizes_of(method) for method in methods],
        "batch_size": batch_size,
        "prompts": [ids.tolist() for ids in prompts],
        "model": identity(methods[0].model),
        "environment": machine,
    }


def _of_memories(
    methods: Sequence[Method], means: list[float], batch_size: int, settings: LatencySettings
) -> list[Row]:
    """Means relative to the same method without a memory, where any has one, which comes
    before it, and what its full memory takes.
    """
    if not any(settings.memory):
        return [{} for _ in methods]
    plain: dict[tuple[Any, ...], float] = {}
    rows = []
    for method, mean in zip(methods, means, strict=True):
        same = tuple(x for name, x in sizes_of(method).items() if name not in OF_MEMORY)
        rows.append({"memory_ratio": mean / plain.setdefault(same, mean)})
        if not settings.generate:
            rows[-1] |= _stored(method, batch_size)
    return rows


def _stored(method: Method, batch_size: int) -> Row:
    """Bytes that a memory takes by the tokens that it keeps aside, and by what these take in a
    cache of the model's dtype, 0 without one; and 10^6 bytes of a full cache and its memory.
    """
    cache = getattr(method, "cache", None)
    layers = [x for x in getattr(cache, "attention", ()) if isinstance(x, WindowLayer)]
    in_rings = sum(x.nbytes for layer in layers for ring in layer.rings for x in ring.data)
    if memory_of(method) is None:
        held = in_rings / 1e6 if layers else None
        return {"stored_bytes": 0.0, "stored_ratio": 0.0, "cache_mb": held}
    assert isinstance(cache, StreamingCache)
    assert isinstance(cache.memory, Memories)
    memories = [*cache.memory.of.values()]
    num_bytes = sum(memory.nbytes for memory in memories)
    stored = num_bytes / method.sizes.memory
    key = memories[0].form.decode(memories[0].entries.keys[:, :, :1])
    in_cache = len(cache.attention) * 2 * key.numel() * memories[0].form.dtype.itemsize
    of_token = {"stored_bytes": stored / batch_size, "stored_ratio": stored / in_cache}
    return of_token | {"cache_mb": (in_rings + num_bytes) / 1e6}


def _peak_mb(method: Method, batch_size: int, seed: int, bar: Bar) -> float | None:
    """Most memory held while an empty cache fills and evicts, in 10^6 bytes; leaves it empty."""
    inputs = filling(method, batch_size, torch.Generator().manual_seed(seed))

    def work() -> None:
        for ids in inputs:
            method.feed(ids)

    method.reset()
    peak = peak_bytes(method.model.device, work)
    method.reset()
    bar.update(1)
    return None if peak is None else peak / 1e6


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """Most bytes of tensors allocated at once while `work` runs, beyond those before; None on a
    device that does not report it, where `work` is not called.

    CUDA's allocator counts them. The CPU's does not: there the profiler reports every allocation
    (+) and release (-), and the peak is that of their running sum.
    """
    gc.collect()  # what is released in the meantime would be taken off the peak
    if device.type == "cuda":
        wait_for(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        wait_for(device)
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


def num_steps(method: Method, settings: LatencySettings) -> int:
    """Number of steps to time: `num_trials * trial_len`, rounded up to whole periods from one
    eviction to the next, so that work done once per period has its share.
    """
    least = settings.num_trials * settings.trial_len
    period = method.sizes.num_evicted
    return -(-least // period) * period


def time_first(
    methods: Sequence[Method], prompts: Sequence[Tensor], settings: LatencySettings, bar: Bar
) -> Seconds:
    """Time from an empty cache to the logits after a whole prompt, ids [B, T]; trial i uses
    prompts[i % len(prompts)].
    """
    for method in methods:
        warm_up(method, prompts[:1])
    seconds: Seconds = [[] for _ in methods]
    for trial, i in rounds(methods, settings.num_trials, bar, settings.seed):
        methods[i].reset()
        ids = prompts[trial % len(prompts)]
        seconds[i].append(clocked(ids.device, methods[i].feed, ids))
    return seconds


def time_steps(
    methods: Sequence[Method], batch_size: int, settings: LatencySettings, bar: Bar
) -> Turns:
    """Seconds of each of `num_steps` steps of one token per stream, without drawing. Caches and
    memories are full: all evicting, realigning, taking back and re-encoding is part of a step. With
    `num_threads` 1 a CPU's clock is that of the thread, which other programs do not move. It does
    not count waits for the disk, where large memories may lie.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    is_alone = settings.num_threads == 1 and model.device.type == "cpu"
    clock = time.thread_time if is_alone else time.perf_counter
    for method in methods:
        warm_up(method, filling(method, batch_size, rng))
        if (cache := memory_of(method)) is not None:
            bar.phase(f"filling {title_of(method)}")
            _fill(cache, rng)
            for _ in range(3):  # the first two of these are compiled, where any is
                method.feed(random_ids(model, batch_size, 1, rng))
    turns: Turns = [[] for _ in methods]
    for trial, i in rounds(methods, settings.num_trials, bar, settings.seed):
        num = num_steps(methods[i], settings)
        first, last = (num * n // settings.num_trials for n in (trial, trial + 1))
        each = (random_ids(model, batch_size, 1, rng) for _ in range(first, last))
        feed = methods[i].feed
        turns[i].append([clocked(model.device, feed, ids, clock=clock) for ids in each])
    return turns


def time_generation(
    methods: Sequence[Method], prompts: Sequence[Tensor], settings: LatencySettings, bar: Bar
) -> tuple[Seconds, Turns]:
    """Times of the first tokens, and of the `generate` later ones of each trial; trial i continues
    prompts[i % len(prompts)], ids [B, T]. A turn is the first token or `trial_len` of the others.

    Raises:
        UserError: a method that ends before.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    prompts = prompts[: settings.num_trials]
    longest = max(ids.shape[1] for ids in prompts) + settings.generate
    for method in methods:
        method.reset()
        if (room := method.tokens_left) is not None and room < longest:
            raise UserError(
                f"{method.name} ends after {room} tokens: leave it out of --methods, or --generate "
                f"fewer (prompt and new tokens are {longest})"
            )
        warm_up(method, filling(method, len(prompts[0]), rng))
    drawing: dict[str, Any] = dict(processors=SAMPLING.processors(), do_sample=True)
    first: Seconds = [[] for _ in methods]
    later: Turns = [[] for _ in methods]
    for trial in range(settings.num_trials):
        seeds, ids = (settings.seed, trial), prompts[trial % len(prompts)]
        draws = [torch.Generator(model.device).manual_seed(sum(seeds)) for _ in methods]
        pairs = zip(methods, draws, strict=True)
        streams = [stream_tokens(x, ids, generator=draw, **drawing) for x, draw in pairs]
        for _, i in rounds(methods, 1, bar, *seeds, 0):
            first[i].append(clocked(model.device, next, streams[i]))
        num_later = math.ceil(settings.generate / settings.trial_len)
        for number, i in rounds(methods, num_later, bar, *seeds, 1):
            num_left = settings.generate - number * settings.trial_len
            each = range(min(num_left, settings.trial_len))
            later[i].append([clocked(model.device, next, streams[i]) for _ in each])
    return first, later


def warm_up(method: Method, inputs: Iterable[Tensor]) -> None:
    """Feed an empty cache off the clock."""
    method.reset()
    for ids in inputs:
        method.feed(ids)


def memory_of(method: Method) -> StreamingCache | None:
    cache = getattr(method, "cache", None)
    return cache if isinstance(cache, StreamingCache) and cache.memory is not None else None


def filling(method: Method, batch_size: int, rng: torch.Generator) -> list[Tensor]:
    """Random ids that fill a cache and make it evict: [B, cache_size + 1] and thrice [B, 1]."""
    lens = (method.sizes.cache_size + 1, 1, 1, 1)
    return [random_ids(method.model, batch_size, num_tokens, rng) for num_tokens in lens]


def rounds(
    methods: Sequence[Method], num_rounds: int, bar: Bar, *seeds: int
) -> Iterator[tuple[int, int]]:
    """Number of the round and index of the method whose turn it is; `bar` counts turns."""
    for number in range(num_rounds):
        for i in np.random.default_rng((*seeds, number)).permutation(len(methods)):
            bar.phase(title_of(methods[i]))
            yield number, i
            bar.update(1)


def clocked(
    device: torch.device,
    work: Callable[..., object],
    *args: Any,
    clock: Callable[[], float] | None = None,
) -> float:
    """Seconds that `work(*args)` takes on a device, by the wall's clock or another."""
    clock = clock or time.perf_counter
    wait_for(device)
    start = clock()
    work(*args)
    wait_for(device)
    return clock() - start


FILLED_AT_ONCE = 2**15


def _fill(cache: StreamingCache, rng: torch.Generator) -> None:
    """Fill the memories of a cache with random entries, as if their tokens had been fed after the
    others. A step then takes as long as with real entries. This is for measuring time, and needs a
    full window.
    """
    assert isinstance(cache.memory, Memories)
    cache.settle()
    memories, period = [*cache.memory.of.values()], cache.frame.move_size
    first = memories[0]
    num = -(-first.most // period) * period  # that leaves every position what it is
    one = first.form.decode(first.entries.keys[:, :, :1])
    for memory in memories:
        device = memory.device
        if rng.device != device:
            rng = torch.Generator(device).manual_seed(rng.initial_seed())
        for start in range(0, num, FILLED_AT_ONCE):
            shape = (*one.shape[:2], min(FILLED_AT_ONCE, num - start), one.shape[3])
            new = (torch.randn(shape, generator=rng, device=device).to(one) for _ in range(2))
            memory.write([n + start for n in cache.seen], KV(*new))
    cache._hold([n + num for n in cache.seen])  # with the window as it is
