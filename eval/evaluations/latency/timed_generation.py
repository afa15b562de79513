"""The paper's protocol on the clock: a prompt, then thousands of tokens, drawn and fed again.

Every method generates with the one loop (`stream_tokens`), from the same prompts, with the same
seeds. The steps before the cache is full and the draws are in the figures.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.evaluations.latency.timing import clocked, filling, rounds, warm_up
from kvalign.foundation.errors import UserError
from kvalign.foundation.progress import Bar
from kvalign.methods.base import Method
from kvalign.streaming.generation import stream_tokens
from kvalign.streaming.sampling import Sampling

SAMPLING = Sampling(top_k=20)  # the paper's


def num_rounds(settings: LatencySettings) -> int:
    """Of the tokens after the first of one trial."""
    return -(-settings.generate // settings.trial_len)


def time_generation(
    methods: Sequence[Method], prompts: Sequence[Tensor], settings: LatencySettings, bar: Bar
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trial i goes on from prompts[i % len(prompts)], ids [B, T], by a first token and `generate`
    more; a turn is the first token or `trial_len` of the others.

    Returns:
        Of each method the seconds to the first token, [num_trials], and of every later one,
        [num_trials * generate].

    Raises:
        UserError: a method that ends before.
    """
    model, rng = methods[0].model, torch.Generator().manual_seed(settings.seed)
    prompts = prompts[: settings.num_trials]
    longest = max(ids.shape[1] for ids in prompts) + settings.generate
    for method in methods:
        _check_room(method, longest)
        warm_up(method, filling(method, len(prompts[0]), rng))
    first: list[list[float]] = [[] for _ in methods]
    later: list[list[float]] = [[] for _ in methods]
    for trial in range(settings.num_trials):
        seeds = settings.seed, trial
        streams = []
        for method in methods:
            draws = torch.Generator(model.device).manual_seed(sum(seeds))
            streams.append(
                stream_tokens(
                    method,
                    prompts[trial % len(prompts)],
                    processors=SAMPLING.processors(),
                    do_sample=True,
                    generator=draws,
                )
            )
        for _, i in rounds(methods, 1, bar, *seeds, 0):
            first[i].append(clocked(model, next, streams[i]))
        for number, i in rounds(methods, num_rounds(settings), bar, *seeds, 1):
            left = settings.generate - number * settings.trial_len
            for _ in range(min(left, settings.trial_len)):
                later[i].append(clocked(model, next, streams[i]))
    return [np.array(times) for times in first], [np.array(times) for times in later]


def _check_room(method: Method, num_tokens: int) -> None:
    method.reset()
    room = method.tokens_left
    if room is not None and room < num_tokens:
        raise UserError(
            f"{method.name} ends after {room} tokens: leave it out of --methods, or --generate "
            f"fewer (prompt and new tokens are {num_tokens})"
        )
