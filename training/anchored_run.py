"""Training the anchored networks on pairs of many shifts, encoded from text as they are needed.

A step encodes chunks twice, whole and without their first tokens, and takes random rows: the same
token at the position where it was first encoded and at an earlier one.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from kvalign.aligners import AnchoredAligner
from kvalign.aligners.anchored import rows_of
from kvalign.aligners.network_sizes import KV
from kvalign.data_gen.pairs import positionless
from kvalign.foundation import progress
from kvalign.models.loading import LoadedModel
from kvalign.training import table_run
from kvalign.training.kinds.anchored import AnchoredSettings
from kvalign.training.streamed_steps import STEP_ENTRIES, tune_networks
from kvalign.training.table_objectives import draw
from kvalign.training.text import Text

CHUNKS = 8  # encoded a step
ROWS = 16_384  # of each kv a step
WEIGHT_DECAY = 0.01


def fit(
    aligner: AnchoredAligner, settings: AnchoredSettings, loaded: LoadedModel, text: Text
) -> dict[str, Any]:
    """Fill the tables as `table_run.fit` does without tuning, then train the networks: on pairs
    with AdamW and linear decay, or through the model.
    """
    step_tokens = 3 * CHUNKS * settings.chunk_len if settings.objective == "mse" else STEP_ENTRIES
    progress.expect(settings.max_steps * step_tokens, "tokens computed")
    record = table_run.fit(aligner.table, replace(settings, objective="mse"), loaded, text)
    if settings.objective != "mse":
        return record | tune_networks(aligner, loaded.model, text, settings)
    rng, num_steps = torch.Generator().manual_seed(settings.seed), settings.max_steps
    nets = torch.nn.ModuleList(getattr(aligner, kv) for kv in settings.kvs)
    nets.requires_grad_(True)
    optimizer = torch.optim.AdamW(nets.parameters(), lr=settings.lr, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    progress.phase("networks")
    for _ in range(num_steps):
        ids = text.rows(rng, CHUNKS, settings.chunk_len)
        shift = draw(rng, 1, settings.chunk_len - 2)
        whole, rest = positionless(loaded.model, ids), positionless(loaded.model, ids[:, shift:])
        pairs = zip(KV, whole, rest, strict=True)
        losses = [_loss(aligner, kv, a, b, rng) for kv, a, b in pairs if kv in settings.kvs]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        schedule.step()
        progress.advance(step_tokens)
    nets.requires_grad_(False)
    return record | {"num_steps": num_steps}


def _loss(
    aligner: AnchoredAligner, kv: str, whole: Tensor, rest: Tensor, rng: torch.Generator
) -> Tensor:
    """Mean squared error of `ROWS` random rows, [] float32: entries of whole chunks
    [B, L, H, T, D], and of what was left of them, re-encoded [B, L, H, T - shift, D].
    """
    chunk, layer, head, now = (
        torch.randint(n, (ROWS,), generator=rng).to(rest.device) for n in rest.shape[:4]
    )
    means, scales = getattr(aligner.table, kv), getattr(aligner.table, f"{kv}_scale")
    birth = now + whole.shape[3] - rest.shape[3]
    x = whole[chunk, layer, head, birth] - means[layer, head, birth]
    x = x / scales[layer, head, birth, None]
    return mse_loss(rows_of(aligner, kv, x, now, layer, head), rest[chunk, layer, head, now])
