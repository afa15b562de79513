"""The shard store: recorded pairs in a folder, read memory-mapped, never in memory as a whole.

    config.json                      written first: settings, model, versions, shapes
    train-k1-00000.safetensors ...   a fixed number of chunks each; written whole or not at all
    manifest.json                    written last: the shards, their rows and SHA-256

A shard holds `key_stale`, `key_aligned`, `value_stale`, `value_aligned`, each
[num_chunks, L, H, S, D] with S = chunk_len - num_sinks - num_evicted, and `chunk` [num_chunks]
int64, places in the corpus.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvalign.aligners.network_sizes import KV
from kvalign.errors import NotFoundError, UserError
from kvalign.files import read_json, sha256, write_whole

CONFIG, MANIFEST = "config.json", "manifest.json"
SPLITS = ("train", "val")
PAIRS = tuple(f"{kv}_{state}" for kv in KV for state in ("stale", "aligned"))

_DTYPES = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}  # torch's and safetensors' names
_NAME = re.compile(r"(train|val)-k([1-9]\d{0,8})-(\d{5,9})\.safetensors")
_FIELDS = ("split", "num_evicted", "num_rows")
_NOTES = "kvalign"  # one entry, because safetensors writes several in random order


@dataclass(frozen=True)
class Shard:
    """One file of the store.

    Attributes:
        num_rows: num_chunks * L * H * S, the pairs of each kv.
    """

    path: Path
    split: str
    num_evicted: int
    num_chunks: int
    num_rows: int

    def tensors(self, kv: str) -> tuple[Tensor, Tensor]:
        """Stale and aligned `key` or `value`, memory-mapped: [num_chunks, L, H, S, D] each."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(f"{kv}_stale"), file.get_tensor(f"{kv}_aligned")

    def chunks(self) -> Tensor:
        """The chunks' places in the corpus, in the order of the tensors: [num_chunks] int64."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor("chunk")

    def notes(self) -> dict[str, Any]:
        """What was noted when the shard was written; empty if nothing was."""
        with safe_open(self.path, "pt") as file:
            return json.loads((file.metadata() or {}).get(_NOTES, "{}"))


@dataclass(frozen=True)
class Store:
    """A finished store.

    Attributes:
        config: `settings` (of gen-data), `model` (its `ModelSpec`), `probe`, `stale`, `shapes`
            (of each number evicted: L, H, S, D), `chunks_per_shard`, `versions`.
        manifest: `shards`; `num_chunks` and `num_rows` of each split;
            `input_label_mse[kv][str(num_evicted)]`, over both splits.
    """

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]

    def shards(self, split: str) -> list[Shard]:
        """The shards of `train` or `val`, by number evicted, then in the order of the corpus."""
        return [shard for shard in _listed(self) if shard.split == split]

    @property
    def shifts(self) -> tuple[int, ...]:
        """Numbers of entries evicted at once, ascending."""
        return tuple(self.config["settings"]["num_evicted"])


def open_store(folder: Path, *, verify: bool = False) -> Store:
    """Open a finished store after a look at the header of each shard.

    Args:
        folder: what `kvalign gen-data --out` wrote.
        verify: also read every byte and compare the SHA-256 of each shard.

    Raises:
        NotFoundError: there is no store.
        UserError: it is unfinished or damaged; the message names the file and what to do.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise NotFoundError(
            f"no recorded data in {folder}: record some with kvalign gen-data --out {folder}"
        )
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is unfinished: run the same gen-data command again")
    store = Store(folder, read_json(folder / CONFIG), read_json(folder / MANIFEST))
    _check_config(folder / CONFIG, store.config)
    shards = list(_listed(store))
    for shard, entry in zip(shards, store.manifest["shards"], strict=True):
        damage = find_damage(shard, store.config)
        if not damage and verify and sha256(shard.path) != entry.get("sha256"):
            damage = "its SHA-256 differs from the manifest's"
        if damage:
            raise UserError(
                f"{shard.path} is damaged ({damage}): delete it and {folder / MANIFEST}, then run "
                "the same gen-data command again"
            )
    return store


def shard_at(
    folder: Path, config: dict[str, Any], split: str, num_evicted: int, index: int, num_chunks: int
) -> Shard:
    """The shard of that place, written or not."""
    num_layers, num_heads, num_slots, _ = config["shapes"][str(num_evicted)]
    num_rows = num_chunks * num_layers * num_heads * num_slots
    path = folder / f"{split}-k{num_evicted}-{index:05d}.safetensors"
    return Shard(path, split, num_evicted, num_chunks, num_rows)


def write_shard(shard: Shard, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write `PAIRS` and `chunk`, with notes that JSON can hold."""
    metadata = {_NOTES: json.dumps(notes, sort_keys=True)}
    write_whole(shard.path, lambda path: save_file(tensors, path, metadata=metadata))


def find_damage(shard: Shard, config: dict[str, Any]) -> str | None:
    """What is wrong with a shard's file by its header and its length, or None."""
    shape = [shard.num_chunks, *config["shapes"][str(shard.num_evicted)]]
    expected = dict.fromkeys(PAIRS, (shape, _DTYPES[config["settings"]["dtype"]]))
    expected["chunk"] = ([shard.num_chunks], "I64")
    try:
        with safe_open(shard.path, "pt") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            found = {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError:
        return "it is missing"
    except (SafetensorError, OSError) as error:
        return str(error)
    for name, wanted in expected.items():
        if found.get(name) != wanted:
            return f"{name} must be {wanted}, found {found.get(name, 'nothing')}"
    return None


def _check_config(path: Path, config: dict[str, Any]) -> None:
    """Raise UserError, naming the field, unless a store can be read by this config."""
    settings, shapes = config.get("settings"), config.get("shapes")
    if not isinstance(settings, dict) or not isinstance(shapes, dict):
        raise UserError(f"{path} is damaged: settings and shapes must be objects")
    if settings.get("dtype") not in list(_DTYPES):
        raise UserError(f"{path} is damaged: dtype must be one of {', '.join(_DTYPES)}")
    shifts: Any = settings.get("num_evicted")
    if not _are_counts(shifts) or sorted(set(shifts)) != shifts:
        raise UserError(f"{path} is damaged: num_evicted must be ascending counts, got {shifts!r}")
    for shift in map(str, shifts):
        if not _are_counts(shapes.get(shift)) or len(shapes[shift]) != 4:
            raise UserError(f"{path} is damaged: shapes[{shift!r}] must be [L, H, S, D]")


def _listed(store: Store) -> Iterator[Shard]:
    """The manifest's shards; a name never leads out of the folder."""
    path, entries = store.folder / MANIFEST, store.manifest.get("shards")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is damaged: shards must be a list of objects")
    for entry in entries:
        name = entry.get("file") if isinstance(entry, dict) else None
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise UserError(f"{path} is damaged: {name!r} is not the name of a shard")
        split, num_evicted, index = match[1], int(match[2]), int(match[3])
        if num_evicted not in store.shifts or not _are_counts([entry.get("num_chunks")]):
            raise UserError(f"{path} is damaged: num_evicted or num_chunks of {name}")
        place = (split, num_evicted, index, entry["num_chunks"])
        shard = shard_at(store.folder, store.config, *place)
        if [entry.get(field) for field in _FIELDS] != [split, num_evicted, shard.num_rows]:
            raise UserError(f"{path} is damaged: {', '.join(_FIELDS)} of {name}")
        yield shard


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) is int and 0 < value < 2**31 for value in values)
    )
