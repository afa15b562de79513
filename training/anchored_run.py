"""Training of the anchored networks: on pairs of many shifts, encoded from text as they are needed,
or through the streaming language model, whose own weights stay frozen.

A step on pairs encodes chunks twice, with and without their first tokens. It takes random rows: the
same token at its original position and at an earlier one.

Unlike tables, networks have no relative form: each entry goes through them at each of its
positions. So streams of text advance side by side, token by token. The gradient of a step's loss
ends at the stored entries.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import DynamicCache, PreTrainedModel

from kvalign.aligners import AnchoredAligner, Move, RealignNet
from kvalign.aligners.entries import KV, cat
from kvalign.aligners.kinds import TARGETS
from kvalign.cache.realign import FromBirth, OnRead, realigner_of
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.data_gen.pairs import encode, positionless
from kvalign.foundation import progress
from kvalign.models.architectures import rotation_of, spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training import table_run
from kvalign.training.kinds import AnchoredSettings
from kvalign.training.table_run import SMALLEST_CACHE, adam, divergence, draw
from kvalign.training.text import Text, val_sizes

CHUNKS = 8  # encoded a step
ROWS = 16_384  # of each kv a step
WEIGHT_DECAY = 0.01
STEP_ENTRIES = 2048  # of all streams together
EPISODE = 16  # steps before other streams are taken
VAL_STEPS = 16


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
        pairs = zip(TARGETS, whole, rest, strict=True)
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
    placed = means[layer, head, now] + x * scales[layer, head, now, None]
    net: RealignNet = getattr(aligner, kv)
    rows = placed + (net(x, now, layer, head) - x)
    return mse_loss(rows, rest[chunk, layer, head, now])


def tune_networks(
    aligner: AnchoredAligner, model: PreTrainedModel, text: Text, settings: AnchoredSettings
) -> dict[str, Any]:
    """Train the networks of `aligner` in place for `max_steps` steps of streams without sinks.

    Returns:
        val_before and val_after, the objective in nats per token on the same validation rows, and
        num_steps. If the loss did not fall, the networks are those from before.
    """
    objective, num_steps = settings.objective, settings.max_steps
    rng = torch.Generator().manual_seed(settings.seed)
    model.requires_grad_(False)
    nets = torch.nn.ModuleList(getattr(aligner, kv) for kv in settings.kvs)
    before = {name: x.clone() for name, x in nets.state_dict().items()}
    val_before = validate(aligner, model, text, objective)
    nets.requires_grad_(True)
    optimizer, schedule = adam(nets.parameters(), settings.lr, num_steps)
    largest = largest_cache(aligner, text.train)
    done = 0
    progress.phase(objective)
    while done < num_steps:
        size = draw(rng, min(SMALLEST_CACHE, largest), largest)
        num_tokens = 2 * size + min(EPISODE, num_steps - done) + 1
        ids = text.rows(rng, max(1, STEP_ENTRIES // size), num_tokens)
        for loss in streamed_losses(objective, aligner, model, ids, size):
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.advance(STEP_ENTRIES, loss=f"{loss.item():.4f}")
            done += 1
    nets.requires_grad_(False)
    val_after = validate(aligner, model, text, objective)
    if val_after >= val_before:
        nets.load_state_dict(before)
        val_after = val_before
    figures = {"val_before": val_before, "val_after": val_after, "num_steps": num_steps}
    return {"objective": objective, **figures}


class Streams:
    """Rows of text, each with a full cache without sinks.

    Args:
        stored: entries [B, H, C, D] of each layer, in the form that `aligner.anchor`
            returns.
    """

    def __init__(self, aligner: AnchoredAligner, model: PreTrainedModel, stored: list[KV]):
        self.model, self.stored = model, stored
        self.realigner, self.size = FromBirth(rotation_of(model), aligner), stored[0].keys.shape[2]

    def step(self, ids: Tensor) -> Tensor:
        """Logits [B, V] of one token [B] per row, with a gradient to the aligner; evicts one."""
        model, size = self.model, self.size
        cache, move = DynamicCache(), Move(1, 0, torch.arange(size, device=model.device))
        for layer, stored in enumerate(self.stored):
            placed = self.realigner.place(layer, stored, move)
            cache.update(*placed.map(lambda x: x.to(model.dtype)), layer)
        logits = model(
            input_ids=ids[:, None].to(model.device),
            position_ids=torch.full((len(ids), 1), size, device=model.device),
            past_key_values=cache,
        ).logits[:, -1]
        birth = slice(size, size + 1)
        with torch.no_grad():
            for layer, entries in enumerate(cache.layers):
                new = KV(entries.keys, entries.values).slots(size, 1).map(Tensor.float)
                new = self.realigner.anchor(layer, new, birth, birth)
                self.stored[layer] = cat([self.stored[layer].slots(1, size - 1), new])
        return logits.float()


@torch.no_grad()
def new_streams(
    aligner: AnchoredAligner, model: PreTrainedModel, ids: Tensor, size: int
) -> Streams:
    """Streams that have been fed ids [B, N], N >= size: all of them, with the tables alone, if
    tables are applied on read; else the last `size`.
    """
    tables = realigner_of(model, aligner.table)
    if isinstance(tables, OnRead) and tables.rotation is None:
        cache = StreamingCache(spec_of(model.config), CacheSizes(size, 0), tables)
        cache.feed_segment(model, ids.to(model.device), logits_to_keep=1)
        newest = (layer.newest(layer.entries, size) for layer in cache.attention)
        return Streams(aligner, model, [one.map(Tensor.float) for one in newest])
    births, realigner = slice(0, size), FromBirth(rotation_of(model), aligner)
    entries = zip(*(x.float().unbind(1) for x in encode(model, ids[:, -size:])), strict=True)
    stored = [
        realigner.anchor(layer, KV(*pair), births, births) for layer, pair in enumerate(entries)
    ]
    return Streams(aligner, model, stored)


def streamed_losses(
    objective: str, aligner: AnchoredAligner, model: PreTrainedModel, ids: Tensor, size: int
) -> Iterator[Tensor]:
    """Losses of the last n tokens of rows [B, 2 C + n + 1] of text."""
    streams = new_streams(aligner, model, ids[:, : 2 * size], size)
    for end in range(2 * size, ids.shape[1] - 1):
        logits = streams.step(ids[:, end])
        yield loss_of(objective, model, ids[:, end - size : end + 2], logits)


def largest_cache(aligner: AnchoredAligner, texts: list[Tensor]) -> int:
    """Return the largest cache that fits the aligner and, twice, the texts."""
    shortest = min(map(len, texts)) - max(EPISODE, VAL_STEPS) - 1
    return min(aligner.config.chunk_len - 1, shortest // 2)


def loss_of(objective: str, model: PreTrainedModel, ids: Tensor, logits: Tensor) -> Tensor:
    """`nll` or `kl` of logits [B, V], given the tokens that a step sees, its own token and the
    label: ids [B, C + 2].
    """
    if objective == "nll":
        return cross_entropy(logits, ids[:, -1].to(logits.device))
    with torch.no_grad():
        teacher = model(input_ids=ids[:, :-1].to(model.device), use_cache=False, logits_to_keep=1)
    return divergence(teacher.logits[:, -1].float(), logits)


@torch.no_grad()
def validate(aligner: AnchoredAligner, model: PreTrainedModel, text: Text, objective: str) -> float:
    """Mean loss on fixed rows, with a small, a middle and the largest cache."""
    progress.phase("validating")
    losses = []
    for size in val_sizes(largest_cache(aligner, text.val)):
        for rows in text.val_rows(max(1, STEP_ENTRIES // size), 2 * size + VAL_STEPS + 1):
            by_step = streamed_losses(objective, aligner, model, rows, size)
            losses += [loss.item() for loss in by_step]
    return sum(losses) / len(losses)
