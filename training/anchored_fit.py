"""Training the anchored network: pairs of many shifts, made on the way from text.

A step encodes chunks twice, whole and without their first tokens, and takes rows at random: the
same token at the position it was born at and at an earlier one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from kvalign.aligners import AnchoredAligner
from kvalign.aligners.anchored import rows_of
from kvalign.data_gen.pairs import positionless
from kvalign.training.table_objectives import draw
from kvalign.training.training_text import Text

CHUNKS = 8  # encoded a step
ROWS = 16_384  # of each kv a step
WEIGHT_DECAY = 0.01


def fit(
    aligner: AnchoredAligner,
    model: PreTrainedModel,
    text: Text,
    *,
    num_steps: int,
    lr: float,
    seed: int,
    targets: tuple[str, ...],
) -> dict[str, Any]:
    """Train the networks of `aligner` in place, its tables stay; AdamW, linear decay.

    Returns:
        num_steps.
    """
    rng = torch.Generator().manual_seed(seed)
    nets = torch.nn.ModuleList(getattr(aligner, kv) for kv in targets)
    nets.requires_grad_(True)
    optimizer = torch.optim.AdamW(nets.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    chunk_len = aligner.config.chunk_len
    with tqdm(total=num_steps, desc="anchored", unit="step") as bar:
        for _ in range(num_steps):
            ids = text.rows(rng, CHUNKS, chunk_len)
            shift = draw(rng, 1, chunk_len - 2)
            found = [
                _loss(aligner, t, *pair, shift, rng)
                for t, pair in _pairs(model, ids, shift, targets)
            ]
            optimizer.zero_grad()
            torch.stack(found).sum().backward()
            optimizer.step()
            schedule.step()
            bar.update()
    nets.requires_grad_(False)
    return {"num_steps": num_steps}


def _pairs(
    model: PreTrainedModel, ids: Tensor, shift: int, targets: tuple[str, ...]
) -> list[tuple[str, tuple[Tensor, Tensor]]]:
    """Of each kv: entries [B, L, H, T - shift, D] of the whole chunks, and re-encoded."""
    whole, rest = positionless(model, ids), positionless(model, ids[:, shift:])
    both = {"key": (whole[0], rest[0]), "value": (whole[1], rest[1])}
    return [(t, (both[t][0][..., shift:, :], both[t][1])) for t in targets]


def _loss(
    aligner: AnchoredAligner,
    kv: str,
    stale: Tensor,
    clean: Tensor,
    shift: int,
    rng: torch.Generator,
) -> Tensor:
    num_chunks, num_layers, num_heads, num_slots, _ = stale.shape
    chunk, layer, head, now = (
        torch.randint(n, (ROWS,), generator=rng).to(stale.device)
        for n in (num_chunks, num_layers, num_heads, num_slots)
    )
    means, scales = getattr(aligner.table, kv), getattr(aligner.table, f"{kv}_scale")
    born = now + shift
    x = (stale[chunk, layer, head, now] - means[layer, head, born]) / scales[
        layer, head, born, None
    ]
    found = rows_of(aligner, kv, x, now, layer, head)
    return mse_loss(found, clean[chunk, layer, head, now])
