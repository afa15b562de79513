"""Training of an aligner on text: everything except the training itself, for any kind."""

import dataclasses
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import KINDS, Aligner, AlignerConfig, Move, TableAligner, new_config
from kvalign.aligners.base import CONFIG
from kvalign.aligners.entries import KV
from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.corpora import hub_datasets, text_sha256
from kvalign.data_gen.recording import positionless
from kvalign.foundation import progress
from kvalign.foundation.errors import ExistsError, UserError
from kvalign.foundation.files import read_checked
from kvalign.models.identity import identity
from kvalign.models.loading import LoadedModel, load_model
from kvalign.training.aligner_folder import (
    IDENTITY,
    OVERWRITE,
    check_free,
    new_aligner,
    record_of,
    save,
)
from kvalign.training.judge import judge, num_judged_tokens, usual_sinks
from kvalign.training.placing import last_position, num_placed_tokens, place
from kvalign.training.settings import TextSettings, device_of
from kvalign.training.text import Texts, read

BATCH_SIZE = 16  # chunks encoded at once

Fit = Callable[[Any, Any, LoadedModel, Texts], dict[str, Any]]
"""Training of an aligner in place, on its device: of the aligner, its settings, the model and text
to fields for the record. None of its parameters requires a gradient before and after.
"""


def usual_positions(chunk_len: int, model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """Return `AlignerConfig.positions` before any were measured: those of large caches are
    squeezed.
    """
    last = last_position(chunk_len, model)
    return () if last == chunk_len - 1 else ((chunk_len - 1, last),)


@progress.shown_as("train")
def train_on_text(
    fit: Fit, settings: TextSettings, loaded: LoadedModel | None = None
) -> dict[str, dict[str, Any]]:
    """Train an aligner, measure it on validation text, and save it with a card in `out`. Its kind
    starts from the original form of entries (`recursive = False`); the sizes in its `default_sizes`
    are read from the settings of the same names.

    Returns:
        for `key` and `value` the record in the aligner's config and card: `val_loss` and
        `input_label_mse` (mean squared errors per number of moving validation chunks by half their
        length, with and without realignment), their `ratio`, the result of `fit`, `used` (a part
        that does not help streams of validation text is saved untrained and changes nothing),
        `judged` (the result of `kvalign.training.judge.judge`), `val_nll` of the saved aligner
        (both absent without `judge`, and everything is used), seconds, data.

    Raises:
        ExistsError: `out` has another aligner, and `overwrite` is not set.
        UserError: an unknown model, or a corpus or a context that is too short.
    """
    if loaded is not None:
        settings = dataclasses.replace(settings, model=loaded.spec.name)
    kind, out = KINDS[settings.aligner_kind], settings.folder
    is_table = issubclass(kind, TableAligner)
    former = _in_aligner(out, settings)
    if former is None:
        check_free(out, settings.overwrite)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if loaded is None:
        loaded = load_model(settings.model, device_of(settings.accelerator), "float32")
    model, longest = loaded.model, loaded.spec.context_len
    if former is not None:
        if former.training[settings.kvs[0]]["data"].get(IDENTITY) != identity(model):
            raise ExistsError(
                f"{out} holds an aligner that was trained with other weights than "
                f"{settings.model} has now: {OVERWRITE}"
            )
        progress.say(f"{out} already has this, finished: nothing to do")
        return {kv: former.training[kv] for kv in settings.kvs}
    if longest is not None and settings.chunk_len > longest:
        raise UserError(
            f"--chunk-len must be at most {longest} for {settings.model} (its context length), got "
            f"{settings.chunk_len}"
        )
    if loaded.spec.family != "learned":
        progress.say(
            f"{settings.model} has {loaded.spec.family} positions, which need no aligner: it "
            "may not help there, and is then saved without effect"
        )
    corpora, num_tokens = list(settings.corpus), settings.num_tokens
    progress.phase(f"reading {', '.join(corpora)}")
    text = read(corpora, loaded.tokenizer, num_tokens, settings.chunk_len)
    torch.manual_seed(settings.seed)
    config = new_config(
        settings.aligner_kind,
        model,
        loaded.spec,
        chunk_len=settings.chunk_len,
        num_sinks=usual_sinks(loaded.spec.family),  # until judged
        shifts=(1,),  # takes any, and any sinks: each position is known, and moves go from birth
        positions=usual_positions(settings.chunk_len, model) if is_table else (),
        sizes={name: getattr(settings, name) for name in kind.default_sizes},
    )
    aligner = new_aligner(kind, config).to(model.device).requires_grad_(False)
    weights = deepcopy(aligner.state_dict())
    data = {"corpus": corpora, "num_tokens": num_tokens, "datasets": hub_datasets(corpora)}
    data |= {"text_sha256": text_sha256(corpora), IDENTITY: identity(model)}
    start = time.perf_counter()
    record = record_of("train", settings, data, model.device)
    chunks = text.chunks("val", settings.chunk_len)
    num_judged = num_judged_tokens(aligner, text, settings.kvs) if settings.judge else 0
    places = settings.judge and settings.place and is_table
    num_judged += num_placed_tokens(aligner, model, text) if places else 0
    progress.expect(2 * chunks.numel() + num_judged, "tokens computed")
    record |= fit(aligner, settings, loaded, text)
    progress.phase("measuring")
    errors = measure(aligner, model, chunks)
    kvs, num_sinks = settings.kvs, config.num_sinks
    if places:
        record |= place(aligner, model, text, settings.seed)
        config = aligner.config
    if settings.judge:
        judged = judge(aligner, weights, model, text, settings.kvs)
        kvs, num_sinks = judged["parts"], judged["num_sinks"]
        record |= {"val_nll": judged["val_nll"], "judged": judged}
    aligner.config = config = config.model_copy(update={"num_sinks": num_sinks})
    progress.phase("saving")
    record["seconds"] = round(time.perf_counter() - start, 1)
    results = {kv: {**errors[kv], **record, "used": kv in kvs} for kv in settings.kvs}
    aligner.config = config.model_copy(update={"training": results})
    save(aligner.cpu(), out)
    return results


def _in_aligner(out: Path, settings: TextSettings) -> AlignerConfig | None:
    """The config of the aligner in `out` if it was made by these settings, of the same texts."""
    if settings.overwrite or not (out / CONFIG).exists():
        return None
    config = read_checked(AlignerConfig, out / CONFIG)
    same = record_of("train", settings, {})["command"], text_sha256(settings.corpus)
    parts = [config.training.get(kv, {}) for kv in settings.kvs]
    sources = [(part.get("command"), part.get("data", {}).get("text_sha256")) for part in parts]
    return config if sources == [same] * len(sources) else None


@torch.no_grad()
def measure(aligner: Aligner, model: PreTrainedModel, chunks: Tensor) -> dict[str, Any]:
    """Mean squared errors per number on chunks [N, T]: entries of their second half, after the
    first half is evicted, against re-encoding the second half alone.
    """
    half = chunks.shape[1] // 2
    move = Move(half, 0, torch.arange(half, device=model.device))
    realigned, unchanged, num_numbers = (*torch.zeros(2, 2, dtype=torch.float32), 0)
    for ids in chunks.split(BATCH_SIZE):
        stale = [x[..., half : 2 * half, :] for x in positionless(model, ids[:, : 2 * half])]
        clean = positionless(model, ids[:, half : 2 * half])
        num_numbers += stale[0].numel()
        for layer in range(clean[0].shape[1]):
            entries = KV(*(x[:, layer] for x in stale))
            outputs = aligner.realign(layer, aligner.anchor(layer, entries, move.now + half), move)
            for i in range(2):
                realigned[i] += (outputs[i] - clean[i][:, layer]).square().sum().cpu()
        for i in range(2):
            unchanged[i] += (stale[i] - clean[i]).square().sum().cpu()
        progress.advance(2 * ids.numel())
    return {
        kv: {
            "val_loss": (realigned[i] / num_numbers).item(),
            "input_label_mse": (unchanged[i] / num_numbers).item(),
            "ratio": (realigned[i] / unchanged[i]).item() if unchanged[i] else None,
        }
        for i, kv in enumerate(TARGETS)
    }
