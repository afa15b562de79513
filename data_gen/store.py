"""Shard store: recorded pairs in a folder, read memory-mapped, never in memory as a whole.

    config.json                      written first: settings, model, versions, shapes
    train-k1-00000.safetensors ...   a fixed number of chunks each; written whole or not at all
    manifest.json                    written last: the shards, their rows and SHA-256

A shard holds `key_stale`, `key_aligned`, `value_stale`, `value_aligned`, each
[num_chunks, L, H, S, D] with S = chunk_len - num_sinks - num_evicted, and `chunk` [num_chunks]
int64, the chunks' indices in the corpus.
"""

import json
import math
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.settings import RecordSettings
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import read_checked, sha256, write_whole
from kvalign.foundation.folders import MANIFEST, folder_of, newest_first
from kvalign.models.architectures import ModelSpec, rotation_of
from kvalign.models.identity import embedding_fingerprint, identity, identity_of
from kvalign.models.loading import LoadedModel

CONFIG = "config.json"
PAIRS = tuple(f"{kv}_{state}" for kv in TARGETS for state in ("stale", "aligned"))

_DTYPES = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}  # torch's and safetensors' names
_NOTES = "kvalign"  # one entry, because safetensors writes several in random order


class RecordingConfig(BaseModel):
    """Config of a recording, `config.json`: the text, the model and the shapes.

    Attributes:
        format: of the file.
        settings: without `out`; the numbers evicted ascend, each once.
        identity: of the model (`kvalign.models.identity`).
        embedding_fingerprint: of the model, for the config of an aligner.
        stale: description of the stale keys and values.
        shapes: of a chunk's tensors, by number evicted: L, H, S, D.
        chunks_per_shard: chunks in each shard but the last of a split.
        versions: of Python and packages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    settings: RecordSettings
    model: ModelSpec
    identity: str
    embedding_fingerprint: tuple[float, ...]
    stale: str
    shapes: dict[int, tuple[int, int, int, int]]
    chunks_per_shard: int
    versions: dict[str, str]

    @property
    def stride(self) -> int:
        return self.settings.stride or self.settings.chunk_len

    def num_bytes(self, num_chunks: int) -> int:
        """Bytes of all pairs of so many chunks."""
        numbers = sum(self.num_rows(k, num_chunks) for k in self.settings.num_evicted)
        itemsize = getattr(torch, self.settings.dtype).itemsize
        return numbers * self.model.head_dim * len(PAIRS) * itemsize

    def num_rows(self, num_evicted: int, num_chunks: int) -> int:
        """Number of pairs of each kv in so many chunks: num_chunks * L * H * S."""
        return num_chunks * math.prod(self.shapes[num_evicted][:3])


def new_config(settings: RecordSettings, loaded: LoadedModel) -> RecordingConfig:
    """Config of a new recording; UserError if the model is too short for a chunk."""
    spec, limit = loaded.spec, loaded.spec.context_len
    if limit is not None and settings.chunk_len > limit:
        raise UserError(
            f"--chunk-len must be at most {limit} for {spec.name} (its context length), "
            f"got {settings.chunk_len}"
        )
    shifts = tuple(sorted(set(settings.num_evicted)))
    stride = settings.stride or settings.chunk_len
    recorded = replace(settings, out=None, stride=stride, num_evicted=shifts)
    num_slots = recorded.chunk_len - recorded.num_sinks
    shapes = {
        shift: (spec.num_layers, spec.num_kv_heads, num_slots - shift, spec.head_dim)
        for shift in shifts
    }
    itemsize = getattr(torch, settings.dtype).itemsize
    chunk_bytes = len(PAIRS) * math.prod(shapes[shifts[0]]) * itemsize
    versions = {name: version(name) for name in ("kvalign", "torch", "transformers")}
    rotated = "keys rerotated to the new positions, values as encoded"
    return RecordingConfig(
        settings=recorded,
        model=spec,
        identity=identity(loaded.model),
        embedding_fingerprint=embedding_fingerprint(loaded.model),
        stale=rotated if rotation_of(loaded.model) else "keys and values as encoded",
        shapes=shapes,
        chunks_per_shard=max(1, int(settings.shard_mb * 1e6 / chunk_bytes)),
        versions={"python": platform.python_version(), **versions},
    )


class Shard(BaseModel):
    """One file of the store, and its line of the manifest. `num_rows` is num_chunks * L * H * S,
    the pairs of each kv.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    split: str
    num_evicted: int
    num_chunks: int
    num_rows: int
    sha256: str = ""
    folder: Path = Field(Path(), exclude=True)

    @property
    def path(self) -> Path:
        return self.folder / self.file

    def tensors(self, kv: str) -> tuple[Tensor, Tensor]:
        """Stale and aligned `key` or `value`, memory-mapped: [num_chunks, L, H, S, D] each."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(f"{kv}_stale"), file.get_tensor(f"{kv}_aligned")

    def notes(self) -> dict[str, Any]:
        """Return the notes written with the shard: `squared_error`, the sum of squared differences
        by kv, and `tokens_sha256`.
        """
        with safe_open(self.path, "pt") as file:
            return json.loads(file.metadata()[_NOTES])


class Manifest(BaseModel):
    """Manifest of a finished recording, `manifest.json`.

    Attributes:
        format: of the file.
        num_chunks, num_rows: of each split; rows of each kv.
        input_label_mse: mean squared difference of stale and aligned entries over both splits,
            by kv and number evicted.
        shards: by split and number evicted, then in the order of the corpus.
        text_sha256: of the recorded local texts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    num_chunks: dict[str, int]
    num_rows: dict[str, int]
    input_label_mse: dict[str, dict[int, float]]
    shards: list[Shard]
    text_sha256: dict[str, str] = {}


@dataclass(frozen=True)
class Store:
    folder: Path
    config: RecordingConfig
    manifest: Manifest

    def shards(self, split: str | None = None) -> list[Shard]:
        """Shards of `train` or `val`, or all, in the manifest's order."""
        shards = (x.model_copy(update={"folder": self.folder}) for x in self.manifest.shards)
        return [shard for shard in shards if split in (None, shard.split)]

    @property
    def shifts(self) -> tuple[int, ...]:
        """Numbers of entries evicted at once, ascending."""
        return self.config.settings.num_evicted


def open_store(folder: Path, *, verify: bool = False) -> Store:
    """Open a finished recording, after checking the header of each shard.

    Args:
        folder: written by `kvalign gen-data --out`.
        verify: also read every byte and compare the SHA-256 of each shard.

    Raises:
        NotFoundError: no recording is in the folder.
        UserError: it is unfinished or damaged; the message names the file and what to do.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise NotFoundError(
            f"no recorded data in {folder}: record some with kvalign gen-data --out {folder}"
        )
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is unfinished: run the same gen-data command again")
    manifest = read_checked(Manifest, folder / MANIFEST)
    store = Store(folder, read_checked(RecordingConfig, folder / CONFIG), manifest)
    for shard in store.shards():
        damage = find_damage(shard, store.config)
        if not damage and verify and sha256(shard.path) != shard.sha256:
            damage = "its SHA-256 differs from the manifest's"
        if damage:
            raise UserError(
                f"{shard.path} is damaged ({damage}): delete it and {folder / MANIFEST}, then run "
                "the same gen-data command again"
            )
    return store


def check_model(store: Store) -> None:
    """Raise UserError if the model of a recording has other weights now. A model that is not here
    is not missed.
    """
    name, digest = store.config.model.name, store.config.identity
    try:
        now = identity_of(name)
    except UserError:
        return
    if now != digest:
        raise UserError(
            f"{store.folder} was recorded with other weights than {name} has now: record again "
            "into another --out, and name it with --data"
        )


def newest_recording(model: str) -> Path:
    """Folder of the recording of a model that was finished last, in the model's folder
    (`kvalign.foundation.folders`); NotFoundError, with the command that makes one, if there is
    none.
    """
    for manifest in newest_first(model, MANIFEST):
        if read_checked(RecordingConfig, manifest.with_name(CONFIG)).settings.model == model:
            return manifest.parent
    command = RecordSettings(model=model).command_line("gen-data")
    raise NotFoundError(
        f"no finished recording of {model} in {folder_of(model)}: make one with {command}, or name "
        "its folder with --data"
    )


def write_shard(shard: Shard, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    metadata = {_NOTES: json.dumps(notes, sort_keys=True)}
    write_whole(shard.path, lambda path: save_file(tensors, path, metadata=metadata))


def find_damage(shard: Shard, config: RecordingConfig) -> str | None:
    """Return the fault of a shard, by its file's header and length, or None."""
    if shard.num_evicted not in config.shapes:
        return f"{CONFIG} has no shape for k={shard.num_evicted}"
    shape = [shard.num_chunks, *config.shapes[shard.num_evicted]]
    expected = dict.fromkeys(PAIRS, (shape, _DTYPES[config.settings.dtype]))
    expected["chunk"] = ([shard.num_chunks], "I64")
    if not shard.path.exists():
        return "it is missing"
    try:
        with safe_open(shard.path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            header = {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        return str(error)
    for name, value in expected.items():
        if header.get(name) != value:
            return f"{name} must be {value}, found {header.get(name, 'nothing')}"
    return None
