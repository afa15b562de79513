"""Time and memory of streaming methods: all in one process, taking turns.

Time to the first token and time per token are measured apart, since a prompt is read at once and
with room in the cache, and what follows step by step with the cache full; memory is measured when
no clock runs. The ratio to the reference is that of the medians per token.
"""

import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from kvalign.aligners import KINDS, Aligner, new_config
from kvalign.data_gen.prompts import conversations
from kvalign.errors import UserError
from kvalign.eval import shapes
from kvalign.eval.document import document
from kvalign.eval.grid import check_names, make_grid, nums_evicted, sizes_of
from kvalign.eval.memory import peak_bytes
from kvalign.eval.settings import LatencySettings
from kvalign.eval.timing import filling, random_ids, time_first, time_steps
from kvalign.methods import METHODS
from kvalign.methods.base import Method
from kvalign.models import load_model, spec_of
from kvalign.training.settings import TrainSettings

log = logging.getLogger(__name__)

DEFAULT_KINDS = ("table", "network")
SIZES: tuple[str, ...] = ("position_dim", "layer_dim", "head_embed_dim")
SIZES += ("key_hidden1", "key_hidden2", "value_hidden1", "value_hidden2")


def measure(settings: LatencySettings) -> dict[str, Any]:
    """Measure every method at every cache size and batch size.

    Returns:
        A document whose rows have method, aligner (kind; None for methods without one), cache_size,
        num_sinks, num_evicted (entries), batch_size (streams), num_steps (calls timed, without the
        first tokens), and

            ttft_ms    milliseconds from an empty cache to the logits after a prompt, for all
                       streams together, median over the trials
            median_ms, mean_ms, p90_ms, p99_ms
                       milliseconds per token with the cache full: those of a step divided by the
                       batch size
            ratio      median_ms by that of the reference at the same cache and batch size
            peak_mb    10^6 bytes held at once, at most, from an empty cache through a first input
                       of cache_size + 1 tokens and 3 steps, beyond the weights; None where the
                       device does not tell

    Raises:
        UserError: wrong settings, said before any work.
    """
    started = time.perf_counter()
    check_names(settings)
    METHODS.find(settings.reference)
    if settings.reference not in settings.methods:
        raise UserError(f"--reference {settings.reference} is not among --methods")
    num_threads = torch.get_num_threads()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    try:
        model, prompts = _load(settings)
        groups: dict[int, list[Method]] = {}
        for method in make_grid(settings, model, _aligners(model, settings)):
            groups.setdefault(method.sizes.cache_size, []).append(method)
        rows = []
        num_turns = sum(map(len, groups.values())) * len(settings.batch_sizes)
        num_turns *= 2 * settings.num_trials + 1
        with tqdm(total=num_turns, unit="turn", smoothing=0.05) as bar:
            for methods in groups.values():
                for batch_size in settings.batch_sizes:
                    rows += _rows(methods, prompts, batch_size, settings, bar)
        return document("eval latency", settings, rows, started=started)
    finally:
        torch.set_num_threads(num_threads)


def _load(settings: LatencySettings) -> tuple[PreTrainedModel, list[Tensor]]:
    """The model, and prompts [1, T] for the first token to follow."""
    rng = torch.Generator().manual_seed(settings.seed)
    if settings.model.startswith(shapes.PREFIX):
        name = settings.model.removeprefix(shapes.PREFIX)
        model = shapes.build(name, settings.device, settings.dtype, settings.seed)
        return model, [random_ids(model, 1, settings.prompt_len, rng)]
    texts = [turns[0] for turns in conversations(settings.prompts)]
    loaded = load_model(settings.model, settings.device, settings.dtype)
    prompts = []
    for text in texts:
        ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        if ids:
            prompts.append(torch.tensor([ids], device=loaded.model.device))
        else:
            log.warning("no token in prompt %r: random ones are taken for it", text[:40])
            prompts.append(random_ids(loaded.model, 1, settings.prompt_len, rng))
    return loaded.model, prompts


def _aligners(model: PreTrainedModel, settings: LatencySettings) -> list[Aligner] | None:
    """Untrained ones of the kinds asked for; None where trained ones are named, or none at all."""
    if settings.aligner or not any(METHODS.find(name).takes_aligner for name in settings.methods):
        return None
    return [_untrained(kind, model, settings) for kind in settings.aligner_kinds or DEFAULT_KINDS]


def _untrained(kind: str, model: PreTrainedModel, settings: LatencySettings) -> Aligner:
    """An aligner that changes nothing and takes as long as one that does."""
    defaults = TrainSettings.__dataclass_fields__
    sizes = settings.cache_sizes
    num_sinks = settings.num_sinks
    if num_sinks is None:
        num_sinks = 4 if kind == "network" else 0
    config = new_config(
        kind,
        model,
        spec_of(model.config, settings.model),
        chunk_len=max(sizes) + 1,
        num_sinks=num_sinks,
        shifts=tuple({n for size in sizes for n in nums_evicted(settings, size)} or {1}),
        sizes={} if kind == "table" else {name: defaults[name].default for name in SIZES},
    )
    return KINDS.find(kind)(config).requires_grad_(False).eval()


def _rows(
    methods: list[Method],
    prompts: list[Tensor],
    batch_size: int,
    settings: LatencySettings,
    bar: tqdm,
) -> list[dict[str, Any]]:
    """A row a method, at one cache size and one batch size."""
    first = time_first(methods, [ids.repeat(batch_size, 1) for ids in prompts], settings, bar)
    steps = time_steps(methods, batch_size, settings, bar)
    per_token = 1e3 / batch_size * steps  # ms
    medians = np.median(per_token, 1)
    base = medians[[method.name for method in methods].index(settings.reference)]
    return [
        {
            **sizes_of(method),
            "batch_size": batch_size,
            "num_steps": len(own),
            "ttft_ms": 1e3 * np.median(to_first),
            "median_ms": median,
            "mean_ms": own.mean(),
            "p90_ms": np.quantile(own, 0.9),
            "p99_ms": np.quantile(own, 0.99),
            "ratio": median / base,
            "peak_mb": _peak_mb(method, batch_size, settings.seed, bar),
        }
        for method, to_first, own, median in zip(methods, first, per_token, medians, strict=True)
    ]


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
