"""Forecast of a suite: which steps cannot run as the hub is away, and how long the others take.

A step lacks the models, corpora and prompts that are neither here nor on the hub, and what an
earlier step cannot write for it.

The time is a count of decode steps, by the time of a few of them on the device that the suite uses.
Such a step decodes one token with a full cache; a network's counts twice. What is encoded many
tokens at once is counted by tokens. Training of networks, and evaluations that count neither, are
left out: in the paper's suites they are the smaller part.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvalign import checkpoints
from kvalign.app.listing import cached
from kvalign.data_gen.corpora import hub_datasets
from kvalign.data_gen.prompts import MT_BENCH
from kvalign.data_gen.settings import RecordSettings
from kvalign.eval.evaluations.chat import ChatSettings
from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.evaluations.perplexity import PerplexitySettings
from kvalign.eval.evaluations.readability import ReadabilitySettings
from kvalign.foundation import hub
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import Settings
from kvalign.models import fetched
from kvalign.training.settings import TextSettings

Missing = tuple[str, str]  # MODEL or DATA_SET, and its hub name
MODEL, DATA_SET = "model", "data set"
_PROMPTS = "mt-bench"
LEAST = 100_000
"""Steps below which nothing is said: it is minutes."""
_CACHE_SIZE, _NUM_STEPS = 255, 30


def lacks_of(steps: Mapping[str, Settings]) -> dict[str, set[Missing]]:
    """Missing models and data sets of the steps that lack any, by the step's name.

    Args:
        steps: those to run, by name, in order.
    """
    needed = {name: set(_of_hub(settings)) for name, settings in steps.items()}
    if not any(needed.values()) or hub.is_reachable():
        return {}
    here = {(MODEL, name) for name, _ in cached("model")}
    here |= {(DATA_SET, name) for name, _ in cached("dataset")}
    lacks, unwritten = dict[str, set[Missing]](), dict[str, set[Missing]]()
    for name, settings in steps.items():
        values = set(_values(settings))
        lacked = needed[name] - here
        lacked = lacked.union(*(unwritten[value] for value in values & unwritten.keys()))
        if lacked:
            lacks[name] = lacked
            if out := getattr(settings, "out", None):
                unwritten[str(out)] = lacked
    return lacks


def how_to_get(lacks: Mapping[str, set[Missing]], variables: Mapping[str, str]) -> str:
    """One line: what is missing, and how to get it or name something else.

    Args:
        lacks: of `lacks_of`.
        variables: the suite's, with the run's changes.
    """
    missing = set().union(*lacks.values())
    models_first = sorted(missing, key=lambda x: (x[0] != MODEL, x))
    names = ", ".join(map(" ".join, models_first))
    others = {variable: _other(value, missing) for variable, value in variables.items()}
    words = " ".join(f"{variable}={other}" for variable, other in others.items() if other)
    instead = f', or name what is here: --variables "{words}"' if words else ""
    return (
        f"not here or on the hub{hub.why_not()}: {names}. Fetch each where the hub answers, with "
        "`hf download NAME --local-dir NAME` (data sets: --repo-type dataset), and run this in the "
        f"folder that has them{instead}"
    )


def _of_hub(settings: Settings) -> Iterator[Missing]:
    """Models and data sets that settings ask the hub for."""
    model = getattr(settings, "model", None)
    is_known = model in checkpoints.MODELS or model in fetched.MODELS
    if model and not (is_known or hub.is_path(model) or Path(model).exists()):
        yield MODEL, model
    corpus = getattr(settings, "corpus", None) or ()
    specs = [corpus] if isinstance(corpus, str) else [*corpus]
    if getattr(settings, "prompts", None) == _PROMPTS:
        specs.append(f"hub:{MT_BENCH}")
    for name in hub_datasets(specs):
        yield DATA_SET, name


def _values(settings: Settings) -> Iterator[str]:
    """Values of settings as text, of a tuple each."""
    for value in vars(settings).values():
        yield from map(str, value if isinstance(value, tuple) else (value,))


def _other(value: str, missing: set[Missing]) -> str:
    """Value for a variable that names something missing; "" if it names nothing such."""
    if (MODEL, value) in missing:
        return "FOLDER"
    if value == _PROMPTS and (DATA_SET, MT_BENCH) in missing:
        return "own"
    is_corpus = any((DATA_SET, name) in missing for name in hub_datasets([value]))
    return "text:FILE" if is_corpus else ""


def estimate(steps: Mapping[str, Settings]) -> str:
    """Line on how long steps take; "" for minutes, or for a model that is not here yet."""
    works = {name: work_of(settings) for name, settings in steps.items()}
    num_steps, num_tokens = (sum(work[i] for work in works.values()) for i in range(2))
    if num_steps + num_tokens / 50 < LEAST:
        return ""
    try:
        step_s, token_s, device = speeds(steps[max(works, key=works.__getitem__)])
    except UserError:
        return ""
    hours = (num_steps * step_s + num_tokens * token_s) / 3600
    return (
        f"about {hours:.1f} hours on {device}, without the training of networks: {num_steps:,} "
        f"steps of {1e3 * step_s:.1f} ms and {num_tokens:,} encoded tokens of "
        f"{1e3 * token_s:.2f} ms"
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

    from kvalign.foundation.machine import resolved, wait_for
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
