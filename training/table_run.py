"""Training of position tables: the mean and the scale of keys and values at each position of a
text, in one pass; with another objective, then tuned through the streaming language model, whose
own weights stay frozen.

The baseline `projected` needs no text. It uses each layer's projection of GPT-2's position
embeddings.

    k <- k - A p_i + A p_j        A the layer's key (value) projection, p_i the embedding of i

Aldea et al. 2024 mention it but use networks: a layer norm stands before A, and later layers see
more than a sum of token and position.

The change that is tuned is defined at a few positions (knots) and linear in between. Neighbouring
positions behave alike, and a knot learns from thousands of tokens, a position only from a dozen.

`nll` is the model's own loss on the text. `kl` is the divergence from the model that re-encodes its
window at each step, at random labels. `context` is that from the model that sees as much text as
its context length allows, at all labels: a pass of it gives those of a whole row. Neither sees
labels, so the gain of `kl` is realignment only; `context` can also gain what the window has lost.
The further gain of `nll` is adaptation to the text. For the corpus `recall` only answers count.

The network of `table-network` is trained with the tables.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, TableAligner, TableNetworkAligner
from kvalign.aligners.kinds import TARGETS
from kvalign.aligners.table import TABLES
from kvalign.cache import segments
from kvalign.cache.realigner import Realigner, is_exact, realigner_of
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.data_gen.recording import positionless
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training.placing import last_position
from kvalign.training.settings import TableSettings
from kvalign.training.text import Texts, val_sizes
from kvalign.training.text_run import BATCH_SIZE


def fit(
    table: TableAligner, settings: TableSettings, loaded: LoadedModel, text: Texts
) -> dict[str, Any]:
    """Fill untrained tables, as the settings ask.

    Returns:
        the result of `tune`, unless the objective takes no steps.
    """
    model, chunk_len = loaded.model, settings.chunk_len
    table.check(model, CacheSizes(chunk_len - 1, 0))
    in_segments = is_exact(model, chunk_len - 1, realigner_of(model, table))
    trained = settings.objective not in ("mse", "projected")
    if trained and not in_segments:
        raise UserError(
            f"--objective {settings.objective} is not for {loaded.spec.model_type} models: their "
            "attention does not go through transformers' registry; use mse"
        )
    num_tokens = text.chunks("train", chunk_len).numel() if settings.init == "means" else 0
    num_tokens += tuning_tokens(model, text, settings) if trained else 0
    progress.expect(num_tokens, "tokens computed")
    record: dict[str, Any] = {}
    if settings.objective == "projected":
        project_positions(table, model, settings.kvs)
        record["objective"] = settings.objective
    elif settings.init == "means":
        standardise(table, model, text.chunks("train", chunk_len), settings.kvs)
    elif settings.init != "none":
        _start_from(table, settings.init, model)
    if trained:
        record |= tune(table, model, text, settings)
    return record


def _start_from(table: TableAligner, name: str, model: PreTrainedModel) -> None:
    """Copy the tables of another aligner, for the same model and as long."""
    other = Aligner.from_pretrained(name)
    if not isinstance(other, TableAligner) or other.config.chunk_len != table.config.chunk_len:
        raise UserError(
            f"--init {name}: a table of chunk_len {table.config.chunk_len} is needed, got "
            f"{other.config.kind} of {other.config.chunk_len}"
        )
    other.check(model, CacheSizes(other.config.chunk_len - 1, 0))
    table.load_state_dict(other.state_dict(), strict=False)  # which has no network of its own


@torch.no_grad()
def standardise(
    table: TableAligner, model: PreTrainedModel, chunks: Tensor, kvs: tuple[str, ...]
) -> None:
    """Set the tables to mean and scale over chunks [N, chunk_len]; keys of rotary models unrotated.

    A scale is relative to that of the last position: 1 leaves an entry's size unchanged.
    """
    sums, squares = (
        {kv: torch.zeros(table.key.shape, dtype=torch.float64) for kv in kvs} for _ in range(2)
    )
    progress.phase("means")
    for ids in chunks.split(BATCH_SIZE):
        entries = dict(zip(TARGETS, positionless(model, ids), strict=True))
        for kv in kvs:
            # A batch in float32, all of them in float64, whose sums take far longer.
            sums[kv] += entries[kv].sum(0).cpu()
            squares[kv] += entries[kv].square_().sum(0).cpu()
        progress.advance(ids.numel())
    for kv in kvs:
        means = sums[kv] / len(chunks)
        deviations = (squares[kv] / len(chunks) - means.square()).mean(-1).clamp(min=0).sqrt()
        scales = (deviations / deviations[..., -1:]).nan_to_num(1, 1, 1)
        getattr(table, kv).copy_(means)
        # Where nothing varies (a single chunk, a fixed first token) there is nothing to scale by.
        getattr(table, f"{kv}_scale").copy_(torch.where(scales > 0, scales, 1))


@torch.no_grad()
def project_positions(table: TableAligner, model: PreTrainedModel, kvs: tuple[str, ...]) -> None:
    """Set the means of a table to the projected embeddings of its positions. They contain biases,
    which cancel in each move.

    Raises:
        UserError: the architecture is not GPT-2's.
    """
    if (kind := model.config.model_type) != "gpt2":
        raise UserError(f"--objective projected is for gpt2 models, not {kind} ones")
    gpt2: Any = model.base_model
    embeddings = gpt2.wpe.weight[: table.config.chunk_len]  # [P, N]
    for layer, block in enumerate(gpt2.h):
        _, *keys_and_values = block.attn.c_attn(embeddings).chunk(3, -1)
        for kv, x in zip(TARGETS, keys_and_values, strict=True):
            if kv in kvs:
                means = x.unflatten(1, (-1, table.config.head_dim)).transpose(0, 1)  # [H, P, D]
                getattr(table, kv)[layer].copy_(means)


ROW_LEN = 512  # tokens of a row at least, or three times the cache size if that is less
STRIDE = 64  # tokens by which the window of `context` moves on
NETWORK_RATE = 2.0  # of a network, relative to that of the tables
STEP_TOKENS = 2048
TEACHER_TOKENS = 4096  # re-encoded a step
SMALLEST_CACHE = 16
VAL_EVERY = 50  # steps
VAL_TOKENS = 512  # of validation text through the model at once
# What a step takes, in tokens through the model: there and back, and those of the teacher.
STEP_COST = {
    "nll": 3 * STEP_TOKENS,
    "kl": 3 * STEP_TOKENS + TEACHER_TOKENS,
    "context": 4 * STEP_TOKENS,
}
KNOT_RATIO = 4 / 3


def tune(
    aligner: TableAligner, model: PreTrainedModel, text: Texts, settings: TableSettings
) -> dict[str, Any]:
    """Train the tables of `settings.kvs` in place. Keep the weights with the best validation loss,
    which may be the initial ones.

    Each step streams rows of text with a random cache size and a random number evicted at once,
    both log-uniform, and the sinks of the aligner's config.

    Returns:
        val_before and val_after, the objective in nats per token, and num_steps.
    """
    objective, num_steps = settings.objective, settings.max_steps
    rng = torch.Generator().manual_seed(settings.seed)
    largest = last_position(aligner.config.chunk_len, model)
    realigner = realigner_of(model, aligner)
    model.requires_grad_(False)
    hats = hat_functions(aligner.config.chunk_len).to(aligner.key.device)
    names = [name for name in TABLES if name.partition("_")[0] in settings.kvs]
    for name in names:
        parametrize.register_parametrization(aligner, name, _Knots(getattr(aligner, name), hats))
    changes = [aligner.get_parameter(f"parametrizations.{name}.original") for name in names]
    network = _network_of(aligner, settings.kvs)
    for weight in (*changes, *network):
        weight.requires_grad_()
    faster = {"params": network, "lr": NETWORK_RATE * settings.lr}
    optimizer, schedule = adam([{"params": changes}, faster], settings.lr, num_steps)
    before = best = validate(aligner, model, text, objective)
    val_loss, best_weights = before, deepcopy(aligner.state_dict())
    progress.phase(objective)
    for step in range(num_steps):
        cache_size = draw(rng, min(SMALLEST_CACHE, largest), largest)
        several = torch.rand((), generator=rng, dtype=torch.float32) < 0.4
        num_evicted = draw(rng, 1, cache_size // 2) if several else 1
        row_len = _row_len(cache_size, text.train)
        ids = text.rows(rng, max(1, STEP_TOKENS // row_len), row_len + 1)
        sizes = CacheSizes(cache_size, aligner.config.num_sinks, num_evicted)
        with parametrize.cached():
            optimizer.zero_grad()
            counted = text.counted(ids, cache_size)
            logits = _stream(model, sizes, realigner, ids)
            stream_loss(objective, model, sizes, ids, logits, rng, counted).backward()
        optimizer.step()
        schedule.step()
        progress.advance(STEP_COST[objective], val=f"{val_loss:.4f}", before=f"{before:.4f}")
        if (step + 1) % VAL_EVERY == 0 or step + 1 == num_steps:
            val_loss = validate(aligner, model, text, objective)
            progress.phase(objective)
            if val_loss < best:
                best, best_weights = val_loss, deepcopy(aligner.state_dict())
    aligner.load_state_dict(best_weights)
    for name in names:
        parametrize.remove_parametrizations(aligner, name)
    aligner.requires_grad_(False)
    return {"objective": objective, "val_before": before, "val_after": best, "num_steps": num_steps}


def _network_of(aligner: TableAligner, kvs: Sequence[str]) -> list[nn.Parameter]:
    """Weights beside the tables that correct these vectors."""
    if not isinstance(aligner, TableNetworkAligner):
        return []
    parts = (getattr(net, name) for net in aligner.network for name in ("hidden", *kvs))
    return [weight for part in parts for weight in part.parameters()]


def _row_len(cache_size: int, texts: Sequence[Tensor]) -> int:
    """Tokens of a row: the cache, and labels as many, or more of a small one."""
    return min(max(ROW_LEN, 2 * cache_size), 3 * cache_size, min(map(len, texts)) - 1)


class _Knots(nn.Module):
    """A table [L, H, P, ...] plus the interpolation of its change at the knots [L, H, K, ...]."""

    def __init__(self, table: Tensor, hats: Tensor):
        super().__init__()
        self.table, self.hats = nn.Buffer(table.detach().clone(), persistent=False), hats

    def forward(self, change: Tensor) -> Tensor:
        return self.table + torch.einsum("pk,lhk...->lhp...", self.hats, change)

    def right_inverse(self, table: Tensor) -> Tensor:
        return table.new_zeros(*table.shape[:2], self.hats.shape[1], *table.shape[3:])


def hat_functions(num_positions: int) -> Tensor:
    """Weights [P, K] of the knots at each position: knots at 0, 1, 2, 3 and on, each a third
    further than the last, weights linear in between.
    """
    knots = [0]
    while knots[-1] < num_positions - 1:
        knots.append(min(max(knots[-1] + 1, round(knots[-1] * KNOT_RATIO)), num_positions - 1))
    hats = [np.interp(range(num_positions), knots, one) for one in np.eye(len(knots))]
    return torch.tensor(np.stack(hats, 1), dtype=torch.float32)


@torch.no_grad()
def validate(aligner: TableAligner, model: PreTrainedModel, text: Texts, objective: str) -> float:
    """Mean loss on fixed validation rows, with a small, a middle and the largest cache."""
    progress.phase("validating")
    losses, rng = [], torch.Generator().manual_seed(0)
    for cache_size, rows in _val_rows(last_position(aligner.config.chunk_len, model), text):
        sizes = CacheSizes(cache_size, aligner.config.num_sinks)
        realigner = realigner_of(model, aligner)
        parts = []
        for part in rows.split(max(1, VAL_TOKENS // rows.shape[1])):
            parts.append(_stream(model, sizes, realigner, part))
            progress.advance(part.numel())
        logits, counted = torch.cat(parts), text.counted(rows, cache_size)
        losses.append(stream_loss(objective, model, sizes, rows, logits, rng, counted).item())
    return sum(losses) / len(losses)


def _val_rows(largest: int, text: Texts) -> Iterator[tuple[int, Tensor]]:
    """Cache sizes up to the largest, each with rows [B, N + 1] of one text."""
    for cache_size in val_sizes(largest):
        row_len = _row_len(cache_size, text.val)
        if row_len > cache_size:
            num_rows = max(1, 2 * STEP_TOKENS // row_len // len(text.val))
            for rows in text.val_rows(num_rows, row_len + 1):
                yield cache_size, rows


def tuning_tokens(model: PreTrainedModel, text: Texts, settings: TableSettings) -> int:
    largest = last_position(settings.chunk_len, model)
    num_vals = 1 + -(-settings.max_steps // VAL_EVERY)
    val_tokens = sum(rows.numel() for _, rows in _val_rows(largest, text))
    return settings.max_steps * STEP_COST[settings.objective] + num_vals * val_tokens


def _stream(
    model: PreTrainedModel, sizes: CacheSizes, realigner: Realigner | None, ids: Tensor
) -> Tensor:
    """Logits [B, N - cache_size, V] on rows [B, N + 1] of text, after the first `cache_size`."""
    ids, num_logits = ids.to(model.device), ids.shape[1] - 1 - sizes.cache_size
    cache = StreamingCache(spec_of(model.config), sizes, realigner)
    return segments.feed(cache, model, ids[:, :-1], num_logits).float()


def stream_loss(
    objective: str,
    model: PreTrainedModel,
    sizes: CacheSizes,
    ids: Tensor,
    logits: Tensor,
    rng: torch.Generator,
    counted: Tensor | None = None,
) -> Tensor:
    """Objective on ids [B, N + 1], logits [B, N - cache_size, V], of the labels that count
    (`Texts.counted`); `kl` for random queries of each row, given the tokens that both see.
    """
    ids, (num_rows, num_logits) = ids.to(logits.device), logits.shape[:2]
    which = slice(None) if counted is None else counted.to(ids.device)
    if objective == "nll":
        return cross_entropy(logits.flatten(0, 1)[which], ids[:, -num_logits:].flatten()[which])
    if objective == "context":
        teacher = context_logits(model, ids[:, :-1], sizes.cache_size)
        return divergence(teacher.flatten(0, 1)[which], logits.flatten(0, 1)[which])
    num_queries = max(num_rows, TEACHER_TOKENS // sizes.cache_size)
    if counted is not None:
        indices = counted.view(num_rows, num_logits).nonzero()
        row, column = indices[torch.randint(len(indices), (num_queries,), generator=rng)].T
    else:
        row = torch.arange(num_queries) % num_rows
        column = torch.randint(num_logits, (num_queries,), generator=rng)
    last = column + sizes.cache_size
    first = sizes.num_dropped(last)
    offsets = torch.arange(sizes.cache_size + 1)
    windows = torch.where(offsets < sizes.num_sinks, offsets, first[:, None] + offsets)
    windows = windows.clamp(max=ids.shape[1] - 1)  # what lies beyond `last` is not seen
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=ids[row[:, None], windows], use_cache=False
        ).last_hidden_state
        teacher = model.lm_head(hidden[torch.arange(num_queries), last - first]).float()
    return divergence(teacher, logits[row, column])


@torch.no_grad()
def context_logits(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Logits [B, N - first, V] of the model after each of ids [B, N] from `first` on. It sees all
    tokens before, as far as its context length allows; at the end of that the window moves by
    `STRIDE` tokens at a time.
    """
    num_tokens = ids.shape[1]
    longest = spec_of(model.config).context_len or num_tokens
    parts, start = [], first
    while start < num_tokens:
        stop = min(longest if start < longest else start + STRIDE, num_tokens)
        window = ids[:, max(0, stop - longest) : stop]
        parts.append(model(input_ids=window, use_cache=False, logits_to_keep=stop - start).logits)
        start = stop
    return torch.cat(parts, 1).float()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean KL(teacher || student) in nats of logits [N, V] each."""
    teacher, student = teacher.log_softmax(-1), student.log_softmax(-1)
    return kl_div(student, teacher, log_target=True, reduction="batchmean")


def adam(
    parameters: Iterable[Any], lr: float, num_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Optimiser with its schedule: ten steps up, then a line down to 0."""
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.98))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / num_steps)
    )


def draw(rng: torch.Generator, low: int, high: int) -> int:
    """Whole number between the two, log-uniform."""
    span = math.log(max(high, low) + 1) - math.log(low)
    return min(
        max(high, low),
        int(low * math.exp(span * torch.rand((), generator=rng, dtype=torch.float32).item())),
    )
