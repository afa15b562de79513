"""What `kvalign eval latency` times: a model with prompts, and aligners that need no training."""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import KINDS, Aligner, new_config
from kvalign.data_gen.prompts import conversations
from kvalign.eval import shapes
from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.grid import load, nums_evicted
from kvalign.eval.timing import random_ids
from kvalign.methods import METHODS
from kvalign.models import LoadedModel, spec_of

log = logging.getLogger(__name__)

DEFAULT_KINDS = ("table", "network")


def load_with_prompts(
    settings: LatencySettings, loaded: LoadedModel | None
) -> tuple[LatencySettings, PreTrainedModel, list[Tensor]]:
    """The settings, the model that they name, and prompts [1, T] for the first token to follow."""
    rng = torch.Generator().manual_seed(settings.seed)
    if loaded is None and settings.model.startswith(shapes.PREFIX):
        name = settings.model.removeprefix(shapes.PREFIX)
        model = shapes.build(name, settings.device, settings.dtype, settings.seed)
        return settings, model, [random_ids(model, 1, settings.prompt_len, rng)]
    texts = [turns[0] for turns in conversations(settings.prompts)]
    settings, loaded = load(settings, loaded)
    prompts = []
    for text in texts:
        ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        if ids:
            prompts.append(torch.tensor([ids], device=loaded.model.device))
        else:
            log.warning("no token in prompt %r: random ones are taken for it", text[:40])
            prompts.append(random_ids(loaded.model, 1, settings.prompt_len, rng))
    return settings, loaded.model, prompts


def untrained_aligners(model: PreTrainedModel, settings: LatencySettings) -> list[Aligner] | None:
    """Untrained ones of the kinds asked for; None where trained ones are named, or none at all."""
    if settings.aligner or not any(METHODS.find(name).takes_aligner for name in settings.methods):
        return None
    return [_untrained(kind, model, settings) for kind in settings.aligner_kinds or DEFAULT_KINDS]


def _untrained(kind: str, model: PreTrainedModel, settings: LatencySettings) -> Aligner:
    """An aligner that changes nothing and takes as long as one that does."""
    cls = KINDS.find(kind)
    sizes = settings.cache_sizes
    num_sinks = cls.default_num_sinks if settings.num_sinks is None else settings.num_sinks
    config = new_config(
        kind,
        model,
        spec_of(model.config, settings.model),
        chunk_len=max(sizes) + 1,
        num_sinks=num_sinks,
        shifts=tuple({n for size in sizes for n in nums_evicted(settings, size)} or {1}),
        sizes=dict(cls.default_sizes),
    )
    return cls(config).requires_grad_(False).eval()
