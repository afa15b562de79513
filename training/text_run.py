"""Training an aligner on a model and text: all but the training itself, for any kind."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, new_config
from kvalign.aligners.network_sizes import KV
from kvalign.data_gen.corpora import hub_datasets
from kvalign.data_gen.pairs import positionless
from kvalign.errors import UserError
from kvalign.models import LoadedModel, load_model
from kvalign.training.aligner_folder import check_free, record_of, save, train_command
from kvalign.training.settings import TextSettings
from kvalign.training.training_text import Text, read

BATCH_SIZE = 16  # chunks encoded at once

A = TypeVar("A", bound=Aligner)
S = TypeVar("S", bound=TextSettings)
Fit = Callable[[A, S, LoadedModel, Text], dict[str, Any]]


def train_on_text(
    kind: type[A], fit: Fit[A, S], settings: S, loaded: LoadedModel | None = None
) -> dict[str, dict[str, Any]]:
    """Train an aligner of a kind, measure it on validation text, save it with a card in `out`.

    Args:
        kind: its class, which works from birth (`recursive = False`); the sizes in its
            `default_sizes` are read from the settings of the same names.
        fit: trains an aligner of the kind in place, on its device, and returns what is to be
            recorded of that; of its parameters none requires a gradient before and after. If
            that includes `val_nll` and `val_nll_stale` (loss of streams of validation text with
            the aligner and without), the two decide whether the aligner is used, else `val_loss`
            and `input_label_mse` do.
        settings: of this training.
        loaded: the model, loaded already.

    Returns:
        for `key` and `value` what the aligner's config and card say: `val_loss` and
        `input_label_mse` (mean squared errors per number of moving validation chunks by half
        their length, realigned and as they are), `ratio` of the two, what `fit` returned, `used`
        (an aligner that does not help is saved untrained: it changes nothing), seconds, data.

    Raises:
        ExistsError: `out` holds an aligner, and `overwrite` is not set.
        UserError: no such model, a corpus or a context that is too short.
    """
    check_free(settings.out, settings.overwrite)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if loaded is None:
        loaded = load_model(settings.model, _device(settings.accelerator))
    else:
        settings = dataclasses.replace(settings, model=loaded.spec.name)
    model, longest = loaded.model, loaded.spec.context_len
    if longest is not None and settings.chunk_len > longest:
        raise UserError(
            f"--chunk-len must be at most {longest} for {settings.model} (its context length), got "
            f"{settings.chunk_len}"
        )
    text = read(settings.corpus, loaded.tokenizer, settings.num_tokens, settings.chunk_len)
    torch.manual_seed(settings.seed)
    aligner = untrained(kind, settings, loaded)
    weights = {name: weight.clone() for name, weight in aligner.state_dict().items()}
    data = {
        "corpus": list(settings.corpus),
        "num_tokens": settings.num_tokens,
        "datasets": hub_datasets(settings.corpus),
    }
    start = time.perf_counter()
    record = {
        **record_of(train_command(kind.kind, settings), data, model.device),
        **fit(aligner, settings, loaded, text),
    }
    errors = measure(aligner, model, text.chunks("val", settings.chunk_len))
    if "val_nll" in record:
        record["used"] = record["val_nll"] < record["val_nll_stale"]
    else:
        record["used"] = all(
            errors[kv]["val_loss"] < errors[kv]["input_label_mse"] for kv in settings.kvs
        )
    if not record["used"]:
        aligner.load_state_dict(weights)
    record["seconds"] = round(time.perf_counter() - start, 1)
    results = {kv: {**errors[kv], **record} for kv in settings.kvs}
    aligner.config.training.update(results)
    save(aligner.cpu(), settings.out)
    return results


def untrained(kind: type[A], settings: TextSettings, loaded: LoadedModel) -> A:
    """An aligner of a kind on the model's device, with the sizes that the settings give; it takes
    any sinks and any number evicted at once, as every position is known and moves go from birth.
    """
    config = new_config(
        kind.kind,
        loaded.model,
        loaded.spec,
        chunk_len=settings.chunk_len,
        num_sinks=0,
        shifts=(1,),
        sizes={name: getattr(settings, name) for name in kind.default_sizes},
    )
    return kind(config).to(loaded.model.device).requires_grad_(False)


@torch.no_grad()
def measure(aligner: Aligner, model: PreTrainedModel, chunks: Tensor) -> dict[str, Any]:
    """Mean squared errors per number on chunks [N, T]: entries of their second half, after the
    first half is evicted, against re-encoding the second half alone.
    """
    half = chunks.shape[1] // 2
    move = Move(half, 0, torch.arange(half, device=model.device))
    realigned, unchanged, num_numbers = torch.zeros(2), torch.zeros(2), 0
    for ids in chunks.split(BATCH_SIZE):
        stale = [x[..., half : 2 * half, :] for x in positionless(model, ids[:, : 2 * half])]
        clean = positionless(model, ids[:, half : 2 * half])
        num_numbers += stale[0].numel()
        for layer in range(clean[0].shape[1]):
            anchored = aligner.anchor(
                layer, stale[0][:, layer], stale[1][:, layer], move.now + half
            )
            moved = aligner.realign(layer, *anchored, move)
            for i in range(2):
                realigned[i] += (moved[i] - clean[i][:, layer]).square().sum().cpu()
        for i in range(2):
            unchanged[i] += (stale[i] - clean[i]).square().sum().cpu()
    return {
        kv: {
            "val_loss": (realigned[i] / num_numbers).item(),
            "input_label_mse": (unchanged[i] / num_numbers).item(),
            "ratio": (realigned[i] / unchanged[i]).item() if unchanged[i] else None,
        }
        for i, kv in enumerate(KV)
    }


def _device(accelerator: str) -> str:
    on_gpu = accelerator == "gpu" or (accelerator == "auto" and torch.cuda.is_available())
    return "cuda" if on_gpu else "cpu"
