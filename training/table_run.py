"""Training what starts from birth: position tables, and the network anchored on them.

Tables are the mean and scale of keys and values at each position over a corpus, in one pass.
"""

import logging
import platform
import time
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, AnchoredAligner, Move, TableAligner, new_config
from kvalign.aligners.base import CONFIG
from kvalign.aligners.network_sizes import KV
from kvalign.data_gen.pairs import positionless
from kvalign.errors import ExistsError, UserError
from kvalign.models import LoadedModel, load_model
from kvalign.realign import FromBirth
from kvalign.relative import is_exact
from kvalign.sizes import CacheSizes
from kvalign.training.aligner_folder import SHARED_SIZES, command_line, network_sizes, save
from kvalign.training.anchored_fit import fit
from kvalign.training.settings import TrainSettings
from kvalign.training.table_objectives import nll, tune, validate
from kvalign.training.training_text import Text, read

log = logging.getLogger(__name__)

BATCH_SIZE = 16  # chunks encoded at once
STEPS, LR = 300, 2e-3
READ: tuple[str, ...] = (
    "out",
    "aligner_kind",
    "target",
    "objective",
    "init",
    "model",
    "corpus",
    "num_tokens",
)
READ += ("chunk_len", "accelerator", "num_threads", "overwrite", "resume")
OF_STEPS = ("max_steps", "lr", "seed")


def train(settings: TrainSettings) -> dict[str, dict[str, Any]]:
    """Estimate tables, tune them if an objective other than `mse` is asked, save the aligner.

    Returns:
        for each kv what the aligner's config keeps: `val_loss` and `input_label_mse` (mean
        squared errors per number of moving validation chunks by half their length), `ratio` of the
        two, `val_nll` and `val_nll_stale` (of streams of validation text, with the tables and
        without), `used` (an aligner that lowers neither is saved as one that changes nothing),
        seconds, data; and with `nll` or `kl` what `kvalign.training.table_objectives.tune` reports.

    Raises:
        ExistsError: `out` holds an aligner, and `overwrite` is not set.
        UserError: no model, or a corpus that is too short.
    """
    anchored = settings.aligner_kind == "anchored"
    known = READ + (OF_STEPS if anchored or settings.objective != "mse" else ())
    known += tuple(f"{kv}_hidden{i}" for kv in KV for i in (1, 2)) if anchored else ()
    known += SHARED_SIZES if anchored else ()
    for name, value in settings.changed().items():
        if name not in known:
            log.warning("kind %s has no %s: %s has no effect", settings.aligner_kind, name, value)
    if (settings.out / CONFIG).exists() and not settings.overwrite:
        raise ExistsError(
            f"{settings.out} already holds an aligner: give --overwrite or another --out"
        )
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    on_gpu = settings.accelerator == "gpu" or (
        settings.accelerator == "auto" and torch.cuda.is_available()
    )
    loaded = load_model(settings.model, "cuda" if on_gpu else "cpu")
    _check(settings, loaded)
    text = read(settings.corpus, loaded.tokenizer, settings.num_tokens, settings.chunk_len)
    targets = KV if settings.target == "both" else (settings.target,)
    aligner = _new(settings, loaded)
    table = aligner.table if isinstance(aligner, AnchoredAligner) else aligner
    made = {
        "command": command_line(settings),
        "device": platform.machine(),
        "num_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("kvalign", "torch")},
        "data": {"corpus": list(settings.corpus), "num_tokens": settings.num_tokens},
    }
    steps: dict[str, Any] = dict(
        num_steps=settings.max_steps or STEPS, lr=settings.lr or LR, seed=settings.seed
    )
    start = time.perf_counter()
    losses = [_loss(table, loaded, text)]
    if settings.init == "means":
        standardise(table, loaded.model, text.chunks("train", settings.chunk_len), targets)
    elif settings.init != "none":
        _start_from(table, settings.init, loaded.model)
    if settings.objective != "mse":
        made |= tune(table, loaded.model, text, objective=settings.objective, **steps)
    losses.append(_loss(table, loaded, text))
    if isinstance(aligner, AnchoredAligner):
        made |= fit(aligner, loaded.model, text, targets=targets, **steps)
    errors = measure(aligner, loaded.model, text.chunks("val", settings.chunk_len))
    stale, aligned = losses
    if stale is None or aligned is None:
        used = all(errors[kv]["val_loss"] < errors[kv]["input_label_mse"] for kv in targets)
    else:
        used = aligned < stale
        made |= {"val_nll": aligned, "val_nll_stale": stale}
    if not used:
        aligner.clear()
    made |= {"used": used, "seconds": round(time.perf_counter() - start, 1)}
    results = {kv: {**errors[kv], **made} for kv in targets}
    aligner.config.training.update(results)
    save(aligner.cpu(), settings.out)
    return results


def _check(settings: TrainSettings, loaded: LoadedModel) -> None:
    """Raise UserError for what the model cannot do."""
    longest = loaded.spec.context_len
    if longest is not None and settings.chunk_len > longest:
        raise UserError(
            f"--chunk-len must be at most {longest} for {settings.model} (its context length), got "
            f"{settings.chunk_len}"
        )
    if settings.objective != "mse" and not _splits(loaded, settings.chunk_len):
        raise UserError(
            f"--objective {settings.objective} is not for {loaded.spec.model_type} models: their "
            "attention does not go through transformers' registry; use mse"
        )


def _splits(loaded: LoadedModel, chunk_len: int) -> bool:
    """Whether streams of the model with a table can be scored in segments."""
    config = new_config("table", loaded.model, loaded.spec, **_sizes(chunk_len))
    with torch.device("meta"):
        realigner = FromBirth(loaded.model)
        realigner.aligner = TableAligner(config)
    return is_exact(loaded.model, chunk_len - 1, realigner)


def _loss(table: TableAligner, loaded: LoadedModel, text: Text) -> float | None:
    """Loss of streams of the validation text, nats a token; None where they would need stepping."""
    if not _splits(loaded, table.config.chunk_len):
        return None
    return validate(table, loaded.model, text, nll)


def _sizes(chunk_len: int) -> dict[str, Any]:
    """Every position is known and moves go from birth to now: any sinks, any number evicted."""
    return dict(chunk_len=chunk_len, num_sinks=0, shifts=(1,))


def _new(settings: TrainSettings, loaded: LoadedModel) -> TableAligner | AnchoredAligner:
    """An aligner of the asked kind that changes nothing yet."""
    kind = AnchoredAligner if settings.aligner_kind == "anchored" else TableAligner
    config = new_config(
        kind.kind,
        loaded.model,
        loaded.spec,
        **_sizes(settings.chunk_len),
        sizes=network_sizes(settings) if kind is AnchoredAligner else {},
    )
    return kind(config).to(loaded.model.device).requires_grad_(False)


def _start_from(table: TableAligner, name: str, model: PreTrainedModel) -> None:
    """Copy the tables of another aligner, which must be for the same model and as long."""
    found = Aligner.from_pretrained(name)
    if not isinstance(found, TableAligner) or found.config.chunk_len != table.config.chunk_len:
        raise UserError(
            f"--init {name}: a table of chunk_len {table.config.chunk_len} is needed, found "
            f"{found.config.kind} of {found.config.chunk_len}"
        )
    found.check(model, CacheSizes(found.config.chunk_len - 1, 0))
    table.load_state_dict(found.state_dict())


@torch.no_grad()
def standardise(
    aligner: TableAligner, model: PreTrainedModel, chunks: Tensor, targets: tuple[str, ...]
) -> None:
    """Set the tables to mean and scale over chunks [N, chunk_len]; keys of rotary models unrotated.

    A scale is relative to that of the last position: 1 leaves an entry's size as it is.
    """
    shape = aligner.key.shape
    sums = {kv: torch.zeros(shape, dtype=torch.float64) for kv in targets}
    squares = {kv: torch.zeros(shape, dtype=torch.float64) for kv in targets}
    for ids in tqdm(chunks.split(BATCH_SIZE), desc="means", unit="batch"):
        entries = dict(zip(KV, positionless(model, ids), strict=True))
        for kv in targets:
            sums[kv] += entries[kv].sum(0, dtype=torch.float64).cpu()
            squares[kv] += entries[kv].square().sum(0, dtype=torch.float64).cpu()
    for kv in targets:
        means = sums[kv] / len(chunks)
        spread = (squares[kv] / len(chunks) - means.square()).mean(-1).clamp(min=0).sqrt()
        scales = (spread / spread[..., -1:]).nan_to_num(1, 1, 1)
        getattr(aligner, kv).copy_(means)
        # Where nothing varies (a single chunk, a fixed first token) there is nothing to scale by.
        getattr(aligner, f"{kv}_scale").copy_(torch.where(scales > 0, scales, 1))


@torch.no_grad()
def measure(aligner: Aligner, model: PreTrainedModel, chunks: Tensor) -> dict[str, Any]:
    """Mean squared errors per number on chunks [N, T]: entries of their second half, after the
    first half is evicted, against re-encoding the second half alone.
    """
    half = chunks.shape[1] // 2
    device = next(aligner.parameters()).device
    move = Move(half, 0, torch.arange(half, device=device))
    moved, unmoved, num_numbers = torch.zeros(2), torch.zeros(2), 0
    for ids in chunks.split(BATCH_SIZE):
        stale = [x[..., half : 2 * half, :] for x in positionless(model, ids[:, : 2 * half])]
        clean = positionless(model, ids[:, half : 2 * half])
        num_numbers += stale[0].numel()
        for layer in range(clean[0].shape[1]):
            anchored = aligner.anchor(
                layer, stale[0][:, layer], stale[1][:, layer], move.now + half
            )
            placed = aligner.realign(layer, *anchored, move)
            for i in range(2):
                moved[i] += (placed[i] - clean[i][:, layer]).square().sum().cpu()
        for i in range(2):
            unmoved[i] += (stale[i] - clean[i]).square().sum().cpu()
    return {
        kv: {
            "val_loss": (moved[i] / num_numbers).item(),
            "input_label_mse": (unmoved[i] / num_numbers).item(),
            "ratio": (moved[i] / unmoved[i]).item() if unmoved[i] else None,
        }
        for i, kv in enumerate(KV)
    }
