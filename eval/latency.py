"""Time per token of streaming methods: all in one process, taking turns, caches full.

A step is one call of `feed` with one token a stream, drawing left out; devices are synchronised
before the clock is read. The ratio to the reference is that of the medians.
"""

import time
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, new_config
from kvalign.commands.eval_latency import LatencySettings
from kvalign.commands.train import TrainSettings
from kvalign.eval import shapes
from kvalign.eval.document import document
from kvalign.methods import Method, make_method, method_class
from kvalign.models import load_model, spec_of

SIZES: tuple[str, ...] = ("position_dim", "layer_dim", "head_embed_dim")
SIZES += ("key_hidden1", "key_hidden2", "value_hidden1", "value_hidden2")


def measure(settings: LatencySettings) -> dict[str, Any]:
    """Time every method at every cache size.

    Returns:
        `settings`, `environment` and `rows`: a dict each with method, aligner (kind), cache_size,
        num_sinks, num_evicted, batch_size, num_steps, median_ms, mean_ms, p90_ms, p99_ms (per
        token), ratio (median by the reference's at the same cache size).

    Raises:
        ValueError: wrong settings, said before any work.
    """
    started = time.perf_counter()
    for name in (*settings.methods, settings.reference):
        method_class(name)
    if settings.reference not in settings.methods:
        raise ValueError(f"--reference {settings.reference} is not among --methods")
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    model = _model(settings)
    turns = [_methods(model, settings, cache_size) for cache_size in settings.cache_sizes]
    rows = []
    num_methods = sum(map(len, turns))
    with tqdm(total=num_methods * settings.num_trials, unit="turn", smoothing=0.05) as bar:
        for methods in turns:
            rows += _rows(methods, _take_turns(methods, settings, bar), settings)
    return document("eval latency", settings, rows, started=started)


def _model(settings: LatencySettings) -> PreTrainedModel:
    if settings.model.startswith(shapes.PREFIX):
        name = settings.model.removeprefix(shapes.PREFIX)
        return shapes.build(name, settings.device, settings.dtype, settings.seed)
    return load_model(settings.model, settings.device, settings.dtype).model


def _methods(model: PreTrainedModel, settings: LatencySettings, cache_size: int) -> list[Method]:
    sizes: dict[str, Any] = dict(
        cache_size=cache_size, num_sinks=settings.num_sinks, num_evicted=settings.num_evicted
    )
    methods = []
    for name in settings.methods:
        takes = method_class(name).takes_aligner
        for kind in settings.aligner_kinds if takes else (None,):
            aligner = _untrained(kind, model, cache_size, settings) if kind else None
            methods.append(make_method(name, model, aligner=aligner, **sizes))
    return methods


def _untrained(
    kind: str, model: PreTrainedModel, cache_size: int, settings: LatencySettings
) -> Aligner:
    """An aligner that changes nothing and takes as long as one that does."""
    if kind not in Aligner.kinds:
        raise ValueError(f"unknown aligner kind {kind!r} (known: {', '.join(Aligner.kinds)})")
    defaults = TrainSettings.__dataclass_fields__
    config = new_config(
        kind,
        model,
        spec_of(model.config, settings.model),
        chunk_len=cache_size + 1,
        num_sinks=settings.num_sinks
        or (4 if kind == "network" and settings.num_sinks is None else 0),
        shifts=(settings.num_evicted or 1,),
        sizes={} if kind == "table" else {name: defaults[name].default for name in SIZES},
    )
    return Aligner.kinds[kind](config).requires_grad_(False).eval()


def _take_turns(methods: list[Method], settings: LatencySettings, bar: tqdm) -> np.ndarray:
    """Seconds of each step: [num_methods, num_trials * trial_len]."""
    rng = torch.Generator().manual_seed(settings.seed)
    model = methods[0].model
    cache_size = methods[0].cache_size
    for method in methods:
        method.reset()
        method.feed(_tokens(model, settings.batch_size, cache_size + 1, rng))
        for _ in range(3):  # warm-up
            method.feed(_tokens(model, settings.batch_size, 1, rng))
    seconds: list[list[float]] = [[] for _ in methods]
    for trial in range(settings.num_trials):
        order = np.random.default_rng((settings.seed, trial)).permutation(len(methods))
        for i in order:
            bar.set_description(f"{methods[i].name} C={cache_size}")
            for _ in range(settings.trial_len):
                token = _tokens(model, settings.batch_size, 1, rng)
                _synchronise(model)
                start = time.perf_counter()
                methods[i].feed(token)
                _synchronise(model)
                seconds[i].append(time.perf_counter() - start)
            bar.update()
    return np.array(seconds)


def _tokens(model: PreTrainedModel, num_rows: int, num_tokens: int, rng: torch.Generator) -> Any:
    ids = torch.randint(model.config.vocab_size, (num_rows, num_tokens), generator=rng)
    return ids.to(model.device)


def _synchronise(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _rows(
    methods: list[Method], seconds: np.ndarray, settings: LatencySettings
) -> list[dict[str, Any]]:
    medians = np.median(seconds, 1)
    names = [method.name for method in methods]
    base = medians[names.index(settings.reference)]
    return [
        {
            "method": method.name,
            "aligner": method.aligner_name,
            "cache_size": method.cache_size,
            "num_sinks": method.num_sinks,
            "num_evicted": method.num_evicted,
            "batch_size": settings.batch_size,
            "num_steps": seconds.shape[1],
            "median_ms": 1e3 * median / settings.batch_size,
            "mean_ms": 1e3 * own.mean() / settings.batch_size,
            "p90_ms": 1e3 * np.quantile(own, 0.9) / settings.batch_size,
            "p99_ms": 1e3 * np.quantile(own, 0.99) / settings.batch_size,
            "ratio": median / base,
        }
        for method, own, median in zip(methods, seconds, medians, strict=True)
    ]
