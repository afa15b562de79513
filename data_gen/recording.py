"""Recording of the training pairs of a corpus, shard by shard: an entry of a full cache after an
eviction, and the same entry by re-encoding.

    tokens    s s s s e 5 6 7 8   encode all: K, V at positions 0..8; of slots 5..8: stale
    evict e   s s s s   5 6 7 8   encode the rest: K, V at positions 0..7; of slots 4..7: aligned

(4 sinks s, num_evicted = 1; Aldea, Hwang, Kim, Liang 2024.) Stale keys of rotary models are first
rotated to their new positions. That part of the move is exact; an aligner learns the rest.

The content of a shard depends only on the settings and the corpus. So an interrupted run continues
where it stopped and ends in the same bytes, on as many threads: sums in another order would change
the last bits. One shard for each number evicted is in memory.

Chunks are tokens encoded together. The split of each depends only on its index, so that all runs
agree.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.corpora import cut_chunks, equal_shares, text_sha256, token_pieces
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import (
    CONFIG,
    PAIRS,
    Manifest,
    RecordingConfig,
    Shard,
    Store,
    find_damage,
    new_config,
    open_store,
    write_shard,
)
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import locked, sha256
from kvalign.foundation.folders import MANIFEST
from kvalign.foundation.machine import check_disk
from kvalign.foundation.runs import ResumableRun, keeping
from kvalign.foundation.settings import keywords_of
from kvalign.models.architectures import rotation_of, spec_of
from kvalign.models.input_ids import prefix_ids
from kvalign.models.loading import LoadedModel, load_model

log = logging.getLogger(__name__)

SPLITS = ("train", "val")
BLOCK_CHUNKS = 4  # overlapping chunks are split by blocks of text this many chunks long


@dataclass(frozen=True)
class ShardChunks:
    """Chunks of one shard; the shards of all numbers evicted have the same."""

    split: str
    shard_index: int  # in its split
    chunk_indices: Tensor  # [num_chunks] int64, in the corpus
    ids: Tensor  # [num_chunks, T] int64

    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


_FREE = ("batch_size", "device")  # may change between the runs: they touch the last bits at most


@keywords_of(RecordSettings)
@progress.shown_as("gen-data")
def record(settings: RecordSettings, *, loaded: LoadedModel | None = None) -> Store:
    """Record stale and aligned keys and values of a corpus in `out`, or the missing part.

    Args:
        loaded: the model, if it is already loaded; `model` is then only its name.

    Returns:
        the finished store.

    Raises:
        UserError: the model or the corpus is too short for the settings, the folder has another
            recording, or a number does not fit `dtype`.
    """
    loaded = loaded or load_model(settings.model, settings.device, "float32")
    config = new_config(settings, loaded)
    num_needed = first_val_chunk(settings.chunk_len, config.stride) + 1
    needed_len = (num_needed - 1) * config.stride + settings.chunk_len
    if settings.num_tokens < needed_len:
        raise UserError(
            f"--num-tokens must be at least {needed_len} for a chunk in both train and val, "
            f"got {settings.num_tokens}"
        )
    is_finished = (settings.folder / MANIFEST).exists()
    run = ResumableRun(
        settings.folder,
        config.model_dump(mode="json", exclude={"settings": {"out"}}),
        free=_FREE + ("versions",) * is_finished,
        config_name=CONFIG,
        result_name=MANIFEST,
    )
    if run.state() == "finished":
        return open_store(settings.folder)
    progress.phase("reading")
    opening = prefix_ids(loaded.tokenizer)
    cut = cut_chunks(_pieces(settings, loaded), settings.chunk_len, config.stride)
    chunks = ([*opening, *ids[len(opening) :]] for ids in cut)
    first_chunks = list(islice(chunks, num_needed))
    if len(first_chunks) < num_needed:
        num_ids = sum(map(len, _pieces(settings, loaded)))
        most = f" ({num_ids // 2} at most)" if settings.stride is None and num_ids > 32 else ""
        raise UserError(
            f"corpus {', '.join(settings.corpus)} is too short: it has {num_ids} tokens, "
            f"{needed_len} are needed for a chunk of --chunk-len {settings.chunk_len} in both "
            f"train and val: name a longer text, or a smaller --chunk-len{most}"
        )

    written = sum(path.stat().st_size for path in _shards(settings.folder))
    num_bytes = config.num_bytes(_num_expected(settings, config)) - written
    check_disk(num_bytes, settings.folder, f"a recording of {settings.num_tokens} tokens")
    summary = partial(_summary, settings.folder)
    with locked(settings.folder, summary), keeping(summary):
        if run.state() == "new":
            run.begin()
        shards = _record_shards(settings, config, loaded, chain(first_chunks, chunks))
        run.finish(_manifest(shards, config).model_dump(mode="json"))
    return open_store(settings.folder)


def _pieces(settings: RecordSettings, loaded: LoadedModel) -> Iterator[list[int]]:
    pieces = [token_pieces(spec, loaded.tokenizer, "train") for spec in settings.corpus]
    return equal_shares(pieces, settings.num_tokens)


def _record_shards(
    settings: RecordSettings,
    config: RecordingConfig,
    loaded: LoadedModel,
    chunks: Iterable[list[int]],
) -> list[Shard]:
    """Write the shards that are missing; returns all of them in the manifest's order."""
    num_expected = _num_expected(settings, config)
    num_chunks, shards = 0, list[Shard]()
    progress.phase("recording")
    progress.expect(num_expected * settings.chunk_len, "tokens")
    for of_shard in by_shard(chunks, config):
        shifts, tokens = config.settings.num_evicted, of_shard.sha256()
        expected = [expected_shard(settings.folder, config, of_shard, k) for k in shifts]
        shards += expected
        num_chunks = max(num_chunks, int(of_shard.chunk_indices[-1]) + 1)
        # Those that are written, whole, and of these tokens, stay: a corpus may have changed.
        new_shards = [
            shard
            for shard in expected
            if find_damage(shard, config) or shard.notes()["tokens_sha256"] != tokens
        ]
        if new_shards:
            record_chunks(settings, loaded, of_shard, new_shards)
        else:
            progress.skip(of_shard.ids.numel())
    if num_chunks < num_expected:
        corpus = ", ".join(settings.corpus)
        log.warning("corpus %s ended after %d of %d chunks", corpus, num_chunks, num_expected)
    return sorted(shards, key=lambda shard: (shard.split, shard.num_evicted, shard.file))


def by_shard(chunks: Iterable[list[int]], config: RecordingConfig) -> Iterator[ShardChunks]:
    """Chunks, in order, gathered into shards of their split (`split_of`); the last may be
    smaller.
    """
    waiting: dict[str, list[tuple[int, list[int]]]] = {split: [] for split in SPLITS}
    shard_indices = {split: count() for split in SPLITS}

    def take(split: str) -> ShardChunks:
        indices, ids = map(torch.tensor, zip(*waiting[split], strict=True))
        waiting[split].clear()
        return ShardChunks(split, next(shard_indices[split]), indices, ids)

    of = config.settings
    for index, ids in enumerate(chunks):
        split = split_of(index, of.chunk_len, config.stride, of.val_share, of.seed)
        if split is not None:
            waiting[split].append((index, ids))
            if len(waiting[split]) == config.chunks_per_shard:
                yield take(split)
    yield from (take(split) for split in SPLITS if waiting[split])


def split_of(index: int, chunk_len: int, stride: int, val_share: float, seed: int) -> str | None:
    """Split, `train` or `val`, of the chunk with that index; no token is in chunks of both.

    Without overlap each chunk is drawn on its own. With overlap blocks of text are drawn, and a
    chunk across the border of two splits is in neither: None. The first chunk or block is in
    `train`, the second in `val`.
    """
    if stride >= chunk_len:
        return _split_of(index, val_share, seed)
    ends = (index * stride, index * stride + chunk_len - 1)
    splits = {_split_of(token // (BLOCK_CHUNKS * chunk_len), val_share, seed) for token in ends}
    return splits.pop() if len(splits) == 1 else None


def first_val_chunk(chunk_len: int, stride: int) -> int:
    """Index of the first chunk that `split_of` gives to `val`."""
    return 1 if stride >= chunk_len else -(-BLOCK_CHUNKS * chunk_len // stride)


def _split_of(number: int, val_share: float, seed: int) -> str:
    if number < len(SPLITS):
        return SPLITS[number]
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") < val_share * 2**64 else "train"


def expected_shard(
    folder: Path, config: RecordingConfig, chunks: ShardChunks, num_evicted: int
) -> Shard:
    """The shard of these chunks, written or not."""
    return Shard(
        file=f"{chunks.split}-k{num_evicted}-{chunks.shard_index:05d}.safetensors",
        split=chunks.split,
        num_evicted=num_evicted,
        num_chunks=len(chunks.ids),
        num_rows=config.num_rows(num_evicted, len(chunks.ids)),
        folder=folder,
    )


def _num_expected(settings: RecordSettings, config: RecordingConfig) -> int:
    return (settings.num_tokens - settings.chunk_len) // config.stride + 1


def _shards(folder: Path) -> list[Path]:
    return list(folder.glob("[!.]*.safetensors"))


def _summary(folder: Path) -> str:
    num_shards = len(_shards(folder))
    return f"{num_shards} shards are kept in {folder}" if num_shards else ""


def _manifest(shards: list[Shard], config: RecordingConfig) -> Manifest:
    progress.phase("checksums")
    shifts, mse = config.settings.num_evicted, {kv: dict[int, float]() for kv in TARGETS}
    for shift in shifts:
        of_shift = [shard for shard in shards if shard.num_evicted == shift]
        num_numbers = sum(shard.num_rows for shard in of_shift) * config.model.head_dim
        squares = [shard.notes()["squared_error"] for shard in of_shift]
        for kv in TARGETS:
            mse[kv][shift] = sum(square[kv] for square in squares) / num_numbers
    num_chunks, num_rows, entries = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0), []
    for shard in shards:
        num_rows[shard.split] += shard.num_rows
        if shard.num_evicted == shifts[0]:  # each shift has the same chunks
            num_chunks[shard.split] += shard.num_chunks
        entries.append(shard.model_copy(update={"sha256": sha256(shard.path)}))
    return Manifest(
        num_chunks=num_chunks,
        num_rows=num_rows,
        input_label_mse=mse,
        shards=entries,
        text_sha256=text_sha256(config.settings.corpus),
    )


def record_chunks(
    settings: RecordSettings, loaded: LoadedModel, chunks: ShardChunks, shards: list[Shard]
) -> None:
    """Encode the chunks, a batch at a time, and write their shards."""
    dtype = getattr(torch, settings.dtype)
    parts: dict[int, list[list[Tensor]]] = {shard.num_evicted: [] for shard in shards}
    for ids in chunks.ids.split(settings.batch_size):
        for shift, pairs in record_pairs(loaded, ids, settings.num_sinks, tuple(parts)).items():
            parts[shift].append([x.to("cpu", dtype) for x in pairs])
        progress.advance(ids.numel())
    for shard in shards:
        batches = parts.pop(shard.num_evicted)
        stored = [torch.cat(batch) for batch in zip(*batches, strict=True)]
        if not all(x.isfinite().all() for x in stored):
            raise UserError(
                f"keys or values of {loaded.spec.name} do not fit --dtype {settings.dtype}: use "
                "bfloat16 or float32"
            )
        tensors = dict(zip(PAIRS, stored, strict=True))
        squares = {
            kv: squared_error(tensors[f"{kv}_stale"], tensors[f"{kv}_aligned"]) for kv in TARGETS
        }
        notes = {"squared_error": squares, "tokens_sha256": chunks.sha256()}
        write_shard(shard, {**tensors, "chunk": chunks.chunk_indices}, notes)


@torch.no_grad()
def encode(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ids [B, T] in an empty cache, of all layers: [B, L, H, T, D] each.

    Raises:
        UserError: a hybrid model, which has layers without them.
    """
    spec = spec_of(model.config)
    if spec.states:
        raise UserError(
            f"aligners do not work with {spec.name or 'this model'}: some layers have a state "
            "instead of entries; streaming-llm needs no aligner"
        )
    cache = DynamicCache()  # not made from the config: sliding-window layers keep every entry too
    model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    keys, values = ([getattr(x, name) for x in cache.layers] for name in ("keys", "values"))
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def positionless(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of `encode` in float32, with the keys of rotary models rotated back to position 0."""
    keys, values = (x.float() for x in encode(model, ids))
    if rotation := rotation_of(model):
        keys = rotation.shift_layers(keys, torch.arange(ids.shape[1]), dim=1)
    return keys, values


def record_pairs(
    loaded: LoadedModel, ids: Tensor, num_sinks: int, shifts: tuple[int, ...]
) -> dict[int, tuple[Tensor, ...]]:
    """Stale and aligned keys and values of chunks.

    Args:
        ids: [B, T] int64, chunks without special tokens.
        num_sinks: first entries, which are never evicted.
        shifts: numbers of entries evicted right after the sinks.

    Returns:
        of each shift: key_stale, key_aligned, value_stale, value_aligned,
        [B, L, H, T - num_sinks - shift, D] each, in the model's dtype.
    """
    keys, values = encode(loaded.model, ids)
    rotation, pairs = rotation_of(loaded.model), dict[int, tuple[Tensor, ...]]()
    for shift in shifts:
        rest = torch.cat([ids[:, :num_sinks], ids[:, num_sinks + shift :]], dim=1)
        key_aligned, value_aligned = (x[..., num_sinks:, :] for x in encode(loaded.model, rest))
        key_stale, value_stale = (x[..., num_sinks + shift :, :] for x in (keys, values))
        if rotation:
            key_stale = rotation.shift_layers(key_stale, shift, dim=1)
        pairs[shift] = (key_stale, key_aligned, value_stale, value_aligned)
    return pairs


def squared_error(stale: Tensor, aligned: Tensor) -> float:
    """Sum of squared differences in float64, a chunk at a time: [num_chunks, ...] each."""
    pairs = zip(stale, aligned, strict=True)
    return sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
