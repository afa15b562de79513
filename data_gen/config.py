"""The config of a recording: what its bytes depend on, and whether a folder holds it or another."""

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from kvalign.aligners import embedding_fingerprint
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import CONFIG, MANIFEST, PAIRS
from kvalign.errors import UserError
from kvalign.files import read_json
from kvalign.models import LoadedModel

# Settings that may change between the runs of a recording: they touch the last bits at most.
_FREE = ("batch_size", "device")


def new_config(settings: RecordSettings, loaded: LoadedModel) -> dict[str, Any]:
    """What `config.json` holds; UserError if the model is too short for a chunk."""
    spec, limit = loaded.spec, loaded.spec.context_len
    if limit is not None and settings.chunk_len > limit:
        raise UserError(
            f"--chunk-len must be at most {limit} for {spec.name} (its context length), "
            f"got {settings.chunk_len}"
        )
    runs = ("out", "workers", "ray_address")
    values = {k: v for k, v in settings.as_dict().items() if k not in runs}
    values["stride"] = settings.stride or settings.chunk_len
    values["num_evicted"] = shifts = sorted(set(settings.num_evicted))
    room = settings.chunk_len - settings.num_sinks
    shapes = {k: (spec.num_layers, spec.num_kv_heads, room - k, spec.head_dim) for k in shifts}
    itemsize = getattr(torch, settings.dtype).itemsize
    chunk_bytes = len(PAIRS) * torch.Size(shapes[shifts[0]]).numel() * itemsize
    config = {
        "format": 1,
        "settings": values,
        "model": asdict(spec),
        "embedding_fingerprint": embedding_fingerprint(loaded.model),
        "stale": "keys rerotated to the new positions, values as encoded"
        if spec.family == "rotary"
        else "keys and values as encoded",
        "shapes": shapes,
        "chunks_per_shard": max(1, int(settings.shard_mb * 1e6 / chunk_bytes)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("kvalign", "torch", "transformers")},
        },
    }
    return json.loads(json.dumps(config))  # as it will be read: lists, and keys that are strings


def is_finished(settings: RecordSettings, config: dict[str, Any]) -> bool:
    """Whether the folder has the whole recording; UserError if it has another, or other files."""
    if not (settings.out / CONFIG).exists():
        found = settings.out.iterdir() if settings.out.is_dir() else ()
        if any(not path.name.startswith(".") for path in found):
            raise UserError(f"{settings.out} holds other files: name a new folder with --out")
        return False
    finished = (settings.out / MANIFEST).exists()
    skip = (*_FREE, "versions") if finished else _FREE
    there = read_json(settings.out / CONFIG)
    if field := _first_difference(there, config, skip):
        raise UserError(
            f"{settings.out} was recorded with {field.removeprefix('settings.')} "
            f"{_at(there, field)!r}, not {_at(config, field)!r}: "
            "take that, or name a new folder with --out"
        )
    return finished


def _first_difference(there: Any, here: Any, skip: tuple[str, ...]) -> str:
    """Dotted name of the first field in which two configs differ, or an empty string."""
    for field in {**here, **there}:
        a, b = there.get(field), here.get(field)
        if field in skip or a == b:
            continue
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return field
        if inner := _first_difference(a, b, skip):
            return f"{field}.{inner}"
    return ""


def _at(config: Any, field: str) -> Any:
    for name in field.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config
