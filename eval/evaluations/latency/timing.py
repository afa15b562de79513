"""Timing of methods that take turns, so that a busy moment of the machine affects all of them.

A round is one turn of each method, in a random order. Devices are synchronised before the clock is
read. Prompts and the steps of full caches are timed apart. In the paper's protocol, `stream_tokens`
is timed from a prompt on, including draws and a filling cache.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.streaming_cache import StreamingCache
from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.protocol.grid import title_of
from kvalign.foundation.device import wait_for
from kvalign.foundation.errors import UserError
from kvalign.foundation.progress import Bar
from kvalign.memory.memories import fill
from kvalign.methods.base import Method
from kvalign.streaming.loop import stream_tokens
from kvalign.streaming.sampling import Sampling

SAMPLING = Sampling(top_k=20)  # the paper's

Seconds = list[list[float]]
"""Of each method."""

Turns = list[list[list[float]]]
"""Seconds of the steps of each turn, of each method."""


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
    memories are full: all evicting, realigning, taking back and re-encoding is part of a step.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    for method in methods:
        warm_up(method, filling(method, batch_size, rng))
        if (cache := memory_of(method)) is not None:
            bar.phase(f"filling {title_of(method)}")
            fill(cache, rng)
            for _ in range(3):  # the first two of these are compiled, where any is
                method.feed(random_ids(model, batch_size, 1, rng))
    turns: Turns = [[] for _ in methods]
    for trial, i in rounds(methods, settings.num_trials, bar, settings.seed):
        num = num_steps(methods[i], settings)
        first, last = (num * n // settings.num_trials for n in (trial, trial + 1))
        each = (random_ids(model, batch_size, 1, rng) for _ in range(first, last))
        turns[i].append([clocked(model.device, methods[i].feed, ids) for ids in each])
    return turns


def num_rounds(settings: LatencySettings) -> int:
    """Return the number of tokens after the first of one trial that generates."""
    return -(-settings.generate // settings.trial_len)


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
        _check_room(method, longest)
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
        for number, i in rounds(methods, num_rounds(settings), bar, *seeds, 1):
            num_left = settings.generate - number * settings.trial_len
            each = range(min(num_left, settings.trial_len))
            later[i].append([clocked(model.device, next, streams[i]) for _ in each])
    return first, later


def _check_room(method: Method, num_tokens: int) -> None:
    method.reset()
    room = method.tokens_left
    if room is not None and room < num_tokens:
        raise UserError(
            f"{method.name} ends after {room} tokens: leave it out of --methods, or --generate "
            f"fewer (prompt and new tokens are {num_tokens})"
        )


def warm_up(method: Method, inputs: Iterable[Tensor]) -> None:
    """Feed an empty cache off the clock."""
    method.reset()
    for ids in inputs:
        method.feed(ids)


def memory_of(method: Method) -> StreamingCache | None:
    """The cache of a method that has a memory."""
    cache = getattr(method, "cache", None)
    return cache if isinstance(cache, StreamingCache) and cache.memory is not None else None


def filling(method: Method, batch_size: int, rng: torch.Generator) -> list[Tensor]:
    """Random ids that fill a cache and make it evict: [B, cache_size + 1] and thrice [B, 1]."""
    lens = (method.sizes.cache_size + 1, 1, 1, 1)
    return [random_ids(method.model, batch_size, num_tokens, rng) for num_tokens in lens]


def random_ids(
    model: PreTrainedModel, num_rows: int, num_tokens: int, rng: torch.Generator
) -> Tensor:
    """[num_rows, num_tokens] int64 on the model's device."""
    ids = torch.randint(model.config.vocab_size, (num_rows, num_tokens), generator=rng)
    return ids.to(model.device)


def rounds(
    methods: Sequence[Method], num_rounds: int, bar: Bar, *seeds: int
) -> Iterator[tuple[int, int]]:
    """Number of the round and index of the method whose turn it is; `bar` counts turns."""
    for number in range(num_rounds):
        for i in np.random.default_rng((*seeds, number)).permutation(len(methods)):
            bar.phase(title_of(methods[i]))
            yield number, i
            bar.update(1)


def clocked(device: torch.device, work: Callable[..., object], *args: Any) -> float:
    """Seconds that `work(*args)` takes on a device."""
    wait_for(device)
    start = time.perf_counter()
    work(*args)
    wait_for(device)
    return time.perf_counter() - start
