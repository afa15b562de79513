"""Record the training pairs of a corpus, shard by shard.

What a shard holds depends on the settings and the corpus alone, so an interrupted run continues
where it stopped and ends in the same bytes, however many workers record. One shard for each number
evicted is in a worker's memory.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

from kvalign.data_gen.chunks import chunks, equal_shares, first_of_val, groups
from kvalign.data_gen.config import is_finished, new_config
from kvalign.data_gen.corpora import token_pieces
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import (
    CONFIG,
    KV,
    MANIFEST,
    SPLITS,
    Shard,
    Store,
    find_damage,
    open_store,
    shard_at,
)
from kvalign.data_gen.workers import Task, writer
from kvalign.errors import UserError
from kvalign.files import locked, sha256, write_json
from kvalign.models import LoadedModel

log = logging.getLogger(__name__)


def record(settings: RecordSettings, loaded: LoadedModel) -> tuple[Store, bool]:
    """Record what is missing in `settings.out`.

    Returns:
        the store, and whether it was finished before.

    Raises:
        UserError: the model or the corpus is too short for the settings, the folder holds another
            recording, or a number does not fit `settings.dtype`.
    """
    config = new_config(settings, loaded)
    stride = config["settings"]["stride"]
    num_needed = first_of_val(settings.chunk_len, stride) + 1
    needed_len = (num_needed - 1) * stride + settings.chunk_len
    if settings.num_tokens < needed_len:
        raise UserError(
            f"--num-tokens must be at least {needed_len} for a chunk in both train and val, "
            f"got {settings.num_tokens}"
        )
    if is_finished(settings, config):
        return open_store(settings.out), True
    pieces = equal_shares(
        [token_pieces(spec, loaded.tokenizer, "train") for spec in settings.corpus],
        settings.num_tokens,
    )
    stream = chunks(pieces, settings.chunk_len, stride, settings.num_tokens)
    head = list(itertools.islice(stream, num_needed))
    if len(head) < num_needed:
        raise UserError(
            f"corpus {', '.join(settings.corpus)} has less than the {needed_len} tokens of a "
            "chunk in both train and val: lower --chunk-len or name a longer corpus"
        )
    with locked(settings.out):
        if not (settings.out / CONFIG).exists():
            write_json(settings.out / CONFIG, config)
        shards = _record_shards(settings, config, loaded, itertools.chain(head, stream))
        write_json(settings.out / MANIFEST, _manifest(shards, config))
    return open_store(settings.out), False


def _record_shards(
    settings: RecordSettings,
    config: dict[str, Any],
    loaded: LoadedModel,
    stream: Iterable[list[int]],
) -> list[Shard]:
    """Write the shards that are not there yet; returns all of them in the manifest's order."""
    values = config["settings"]
    num_expected = (settings.num_tokens - settings.chunk_len) // values["stride"] + 1
    num_found = 0
    shards = []
    total = num_expected * settings.chunk_len
    with (
        tqdm(total=total, unit="tok", unit_scale=True, desc="gen-data") as bar,
        writer(settings, loaded, bar.update) as write,
    ):
        for group in groups(stream, values, config["chunks_per_shard"]):
            place = (group.index, len(group.places))
            of_group = [
                shard_at(settings.out, config, group.split, shift, *place)
                for shift in values["num_evicted"]
            ]
            shards += of_group
            num_found = max(num_found, int(group.places[-1]) + 1)
            tokens = hashlib.sha256(group.ids.numpy().tobytes()).hexdigest()
            missing = [shard for shard in of_group if not _is_recorded(shard, config, tokens)]
            if missing:
                write(Task(group, missing, tokens))
            else:
                bar.initial += group.ids.numel()  # no part of the speed
                bar.update(group.ids.numel())
    if num_found < num_expected:
        log.warning(
            "corpus %s ended after %d of %d chunks",
            ", ".join(settings.corpus),
            num_found,
            num_expected,
        )
    return sorted(shards, key=lambda s: (SPLITS.index(s.split), s.num_evicted, s.path.name))


def _is_recorded(shard: Shard, config: dict[str, Any], tokens: str) -> bool:
    """Whether the shard is there, whole, and made of these tokens (a corpus may have changed)."""
    return not find_damage(shard, config) and shard.notes().get("tokens_sha256") == tokens


def _manifest(shards: list[Shard], config: dict[str, Any]) -> dict[str, Any]:
    """What `manifest.json` holds."""
    shifts = config["settings"]["num_evicted"]
    mse: dict[str, dict[str, float]] = {kv: {} for kv in KV}
    for shift in shifts:
        of_shift = [shard for shard in shards if shard.num_evicted == shift]
        num_numbers = sum(shard.num_rows for shard in of_shift) * config["model"]["head_dim"]
        squares = [shard.notes()["squared_error"] for shard in of_shift]
        for kv in KV:
            mse[kv][str(shift)] = sum(square[kv] for square in squares) / num_numbers
    num_chunks, num_rows = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for shard in shards:
        num_rows[shard.split] += shard.num_rows
        if shard.num_evicted == shifts[0]:  # the chunks are the same for each shift
            num_chunks[shard.split] += shard.num_chunks
    return {
        "num_chunks": num_chunks,
        "num_rows": num_rows,
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
