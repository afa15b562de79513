"""Estimate of how long a suite will take, in one line before it starts: a count of its steps, by
the time of a few of them on the device that it uses.

A step decodes one token with a full cache; a network's counts twice. What is encoded many tokens at
once is counted by tokens. Training of networks, and evaluations that count neither, are left out:
in the paper's suites they are the smaller part.
"""

import time
from collections.abc import Sequence

from kvalign.app.suites.cells import Cell
from kvalign.data_gen.settings import RecordSettings
from kvalign.eval.evaluations.chat import ChatSettings
from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.evaluations.perplexity import PerplexitySettings
from kvalign.eval.evaluations.readability import ReadabilitySettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import Settings
from kvalign.training.settings import TextSettings

LEAST = 100_000
"""Steps below which nothing is said: it is minutes."""
_CACHE_SIZE, _NUM_STEPS = 255, 30


def estimate(cells: Sequence[Cell]) -> str:
    """The line; "" for a suite of minutes, or of a model that is not here yet."""
    works = {cell.name: work_of(cell.settings) for cell in cells}
    steps, tokens = (sum(each) for each in zip(*works.values(), strict=True)) if works else (0, 0)
    if steps + tokens / 50 < LEAST:
        return ""
    most = max(cells, key=lambda cell: works[cell.name])
    try:
        step_s, token_s, device = speeds(most.settings)
    except UserError:
        return ""
    hours = (steps * step_s + tokens * token_s) / 3600
    return (
        f"about {hours:.1f} hours on {device}, without the training of networks: {steps:,} steps "
        f"of {1e3 * step_s:.1f} ms and {tokens:,} encoded tokens of {1e3 * token_s:.2f} ms"
    )


def work_of(settings: Settings) -> tuple[int, int]:
    """The decode steps of a command, and the tokens that it encodes many at once."""
    if isinstance(settings, RecordSettings):
        num_chunks = settings.num_tokens // (settings.stride or settings.chunk_len)
        return 0, num_chunks * settings.chunk_len * (1 + len(settings.num_evicted))
    if isinstance(settings, TextSettings):
        return 0, 2 * settings.num_tokens
    if isinstance(settings, PerplexitySettings):
        num = settings.num_tokens
    elif isinstance(settings, LatencySettings):
        num = settings.num_trials * (settings.generate or settings.trial_len)
    elif isinstance(settings, ReadabilitySettings):
        num_runs = settings.num_prompts * settings.num_seeds * len(settings.no_repeat_ngram_sizes)
        num = num_runs * settings.max_new_tokens
    elif isinstance(settings, ChatSettings):
        num = settings.num_turns * settings.max_new_tokens
    else:
        return 0, 0
    steps = tokens = 0
    for cache_size in settings.cache_sizes:
        for method in settings.methods:
            of_method = num * len(settings.aligner or "1") if method == "kvalign" else num
            if method == "recompute":
                tokens += of_method * (cache_size + 1)
            elif getattr(settings, "stepwise", True):
                steps += of_method * (2 if method == "kvalign" else 1)
            else:
                tokens += of_method
    return steps, tokens


def speeds(settings: Settings) -> tuple[float, float, str]:
    """Seconds of a step and of an encoded token of a command's model, and its device; UserError if
    the model cannot be loaded.
    """
    import torch

    from kvalign.foundation.device import resolved, wait_for
    from kvalign.methods import make_method
    from kvalign.models.loading import load_model

    device = resolved(getattr(settings, "device", "auto"))
    model = load_model(getattr(settings, "model", ""), device, "float32").model
    method = make_method("streaming-llm", model, cache_size=_CACHE_SIZE, warn=False)
    ids = torch.zeros(1, _CACHE_SIZE + 1, dtype=torch.int64, device=model.device)
    method.feed(ids)  # warm
    method.reset()
    wait_for(model.device)
    clock = [time.perf_counter()]
    for inputs in (ids, *[ids[:, :1]] * _NUM_STEPS):
        method.feed(inputs)
        wait_for(model.device)
        clock.append(time.perf_counter())
    return (clock[-1] - clock[1]) / _NUM_STEPS, (clock[1] - clock[0]) / ids.numel(), device
