"""Record training pairs of a corpus, shard by shard.

What a shard holds depends on the settings and the corpus alone, so an interrupted run continues where it stopped
and ends in the same bytes. In memory are one shard for each number evicted and two shards' ids.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvalign.commands.gen_data import GenDataSettings
from kvalign.data_gen.chunks import Group, chunks, first_of_val, groups
from kvalign.data_gen.config import is_finished, new_config
from kvalign.data_gen.corpora import token_pieces
from kvalign.data_gen.pairs import PAIRS, TARGETS, record_pairs, squared_error
from kvalign.data_gen.store import (
    CONFIG,
    MANIFEST,
    SPLITS,
    Shard,
    Store,
    find_damage,
    open_store,
    sha256,
    shard_at,
    write_json,
    write_shard,
)
from kvalign.models import LoadedModel

log = logging.getLogger(__name__)


def record(settings: GenDataSettings, loaded: LoadedModel) -> tuple[Store, bool]:
    """Record what is missing in `settings.out`; returns the store and whether it was finished before.

    Raises:
        ValueError: the model or the corpus is too short for the settings, the folder holds another recording, or
            a number does not fit `settings.dtype`.
    """
    config = new_config(settings, loaded)
    stride = config["settings"]["stride"]
    num_needed = first_of_val(settings.chunk_len, stride) + 1
    needed_len = (num_needed - 1) * stride + settings.chunk_len
    if settings.num_tokens < needed_len:
        raise ValueError(
            f"--num-tokens must be at least {needed_len} for a chunk in each split, got {settings.num_tokens}"
        )
    if is_finished(settings, config):
        return open_store(settings.out), True
    pieces = token_pieces(settings.corpus, loaded.tokenizer, "train")
    stream = chunks(pieces, settings.chunk_len, stride, settings.num_tokens)
    head = list(itertools.islice(stream, num_needed))
    if len(head) < num_needed:
        raise ValueError(
            f"corpus {settings.corpus!r} is too short: {needed_len} tokens fill both splits; lower --chunk-len"
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    if not (settings.out / CONFIG).exists():
        write_json(settings.out / CONFIG, config)
    shards = _record_shards(settings, config, loaded, itertools.chain(head, stream))
    write_json(settings.out / MANIFEST, _manifest(shards, config))
    return open_store(settings.out), False


def _record_shards(
    settings: GenDataSettings,
    config: dict[str, Any],
    loaded: LoadedModel,
    stream: Iterable[list[int]],
) -> list[Shard]:
    """Write the shards that are not there yet; returns all of them."""
    shards = []
    values = config["settings"]
    num_expected = (settings.num_tokens - settings.chunk_len) // values["stride"] + 1
    num_found = 0
    with tqdm(
        total=num_expected * settings.chunk_len, unit="tok", unit_scale=True, desc="gen-data"
    ) as bar:
        for group in groups(stream, values, config["chunks_per_shard"]):
            num_chunks = len(group.places)
            of_group = [
                shard_at(settings.out, config, group.split, k, group.index, num_chunks)
                for k in values["num_evicted"]
            ]
            shards += of_group
            num_found = max(num_found, int(group.places[-1]) + 1)
            tokens = hashlib.sha256(group.ids.numpy().tobytes()).hexdigest()
            missing = [
                s for s in of_group if find_damage(s, config) or s.notes().get("tokens") != tokens
            ]
            if missing:
                _write_group(settings, loaded, group, missing, tokens, bar)
            else:
                bar.initial += group.ids.numel()  # not counted as speed
                bar.update(group.ids.numel())
    if num_found < num_expected:
        log.warning(
            "corpus %s ended after %d of %d chunks", settings.corpus, num_found, num_expected
        )
    return sorted(shards, key=lambda s: (SPLITS.index(s.split), s.num_evicted, s.path.name))


def _write_group(
    settings: GenDataSettings,
    loaded: LoadedModel,
    group: Group,
    shards: list[Shard],
    tokens: str,
    bar: tqdm,
) -> None:
    """Encode the chunks of a group, a batch at a time, and write its shards."""
    dtype = getattr(torch, settings.dtype)
    parts: dict[int, list[list[Tensor]]] = {shard.num_evicted: [] for shard in shards}
    for ids in group.ids.split(settings.batch_size):
        for shift, pairs in record_pairs(loaded, ids, settings.num_sinks, tuple(parts)).items():
            parts[shift].append([x.to("cpu", dtype) for x in pairs])
        bar.update(ids.numel())
    for shard in shards:
        stored = [torch.cat(batches) for batches in zip(*parts.pop(shard.num_evicted), strict=True)]
        if not all(x.isfinite().all() for x in stored):
            raise ValueError(
                f"numbers of {loaded.spec.name} do not fit --dtype {settings.dtype}: use float32 or bfloat16"
            )
        tensors = dict(zip(PAIRS, stored, strict=True))
        squares = {
            t: squared_error(tensors[f"{t}_stale"], tensors[f"{t}_aligned"]) for t in TARGETS
        }
        write_shard(
            shard, {**tensors, "chunk": group.places}, {"squared_error": squares, "tokens": tokens}
        )


def _manifest(shards: list[Shard], config: dict[str, Any]) -> dict[str, Any]:
    """What `manifest.json` holds."""
    head_dim = config["model"]["head_dim"]
    mse: dict[str, dict[str, float]] = {target: {} for target in TARGETS}
    for shift in config["settings"]["num_evicted"]:
        of_shift = [shard for shard in shards if shard.num_evicted == shift]
        num_numbers = sum(shard.num_rows for shard in of_shift) * head_dim
        for target in TARGETS:
            total = sum(shard.notes()["squared_error"][target] for shard in of_shift)
            mse[target][str(shift)] = total / num_numbers
    by_split = {split: [shard for shard in shards if shard.split == split] for split in SPLITS}
    first_shift = config["settings"]["num_evicted"][0]
    return {
        "num_chunks": {
            split: sum(s.num_chunks for s in found if s.num_evicted == first_shift)
            for split, found in by_split.items()
        },
        "num_rows": {split: sum(s.num_rows for s in found) for split, found in by_split.items()},
        "input_label_mse": mse,
        "shards": [
            {
                "file": shard.path.name,
                "split": shard.split,
                "num_evicted": shard.num_evicted,
                "num_chunks": shard.num_chunks,
                "num_rows": shard.num_rows,
                "sha256": sha256(shard.path),
            }
            for shard in shards
        ],
    }
