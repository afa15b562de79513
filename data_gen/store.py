"""Shard store: recorded pairs in a folder, read memory-mapped, never in memory as a whole.

    config.json                      written first: settings, model, versions, shapes
    train-k1-00000.safetensors ...   a fixed number of chunks each; written whole or not at all
    manifest.json                    written last: the shards, their rows and SHA-256

A shard holds `key_stale`, `key_aligned`, `value_stale`, `value_aligned`, each
[num_chunks, L, H, S, D] with S = chunk_len - num_sinks - num_evicted, and `chunk` [num_chunks]
int64, the chunks' indices in the corpus.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvalign.data_gen.chunks import ShardChunks
from kvalign.data_gen.config import PAIRS, RecordingConfig
from kvalign.data_gen.settings import RecordSettings
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import read_checked, sha256, write_whole
from kvalign.foundation.folders import MANIFEST, folder_of, newest_first
from kvalign.models.identity import identity_of, say_weak

CONFIG = "config.json"

_DTYPES = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}  # torch's and safetensors' names
_NOTES = "kvalign"  # one entry, because safetensors writes several in random order


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
        num_chunks, num_rows: of each split; rows of each kv.
        input_label_mse: mean squared difference of stale and aligned entries over both splits,
            by kv and number evicted.
        shards: by split and number evicted, then in the order of the corpus.
        text_sha256: of the recorded local texts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_chunks: dict[str, int]
    num_rows: dict[str, int]
    input_label_mse: dict[str, dict[int, float]]
    shards: list[Shard]
    text_sha256: dict[str, str] = {}


@dataclass(frozen=True)
class Store:
    """A finished recording."""

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
    if digest is None:
        say_weak()
        return
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


def write_shard(shard: Shard, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write `PAIRS` and `chunk`, with the notes."""
    metadata = {_NOTES: json.dumps(notes, sort_keys=True)}
    write_whole(shard.path, lambda path: save_file(tensors, path, metadata=metadata))


def find_damage(shard: Shard, config: RecordingConfig) -> str | None:
    """Return the fault of a shard, by its file's header and length, or None."""
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
