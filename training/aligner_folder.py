"""The folder that `kvalign train` writes, for every kind of aligner."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from kvalign.aligners import Aligner, AlignerConfig
from kvalign.aligners.base import CONFIG, WEIGHTS
from kvalign.aligners.network_sizes import SHARED_SIZES
from kvalign.data_gen.store import KV, MANIFEST, Store
from kvalign.files import sha256
from kvalign.training.settings import TrainSettings


def network_sizes(settings: TrainSettings) -> dict[str, int]:
    """The sizes of networks for keys and values, by the names that a config gives them."""
    names = (*SHARED_SIZES, *(f"{kv}_hidden{i}" for kv in KV for i in (1, 2)))
    return {name: getattr(settings, name) for name in names}


def config_for(
    kind: str, store: Store, shifts: tuple[int, ...], sizes: dict[str, int]
) -> AlignerConfig:
    """The config of an aligner of `kind` for the model and the caches that were recorded."""
    model, recorded = store.config["model"], store.config["settings"]
    return AlignerConfig(
        kind=kind,
        base_model=model["name"],
        **{name: model[name] for name in ("family", "num_layers", "num_kv_heads", "head_dim")},
        embedding_fingerprint=tuple(store.config["embedding_fingerprint"]),
        chunk_len=recorded["chunk_len"],
        num_sinks=recorded["num_sinks"],
        shifts=shifts,
        sizes=sizes,
    )


def describe_data(store: Store) -> dict[str, Any]:
    """What an aligner's config and card say of the recording that it was trained on."""
    recorded = store.config["settings"]
    names = ("corpus", "num_tokens", "chunk_len", "num_sinks", "num_evicted")
    return {
        "model": store.config["model"]["name"],
        **{name: recorded[name] for name in names},
        "num_rows": store.manifest["num_rows"],
        "manifest_sha256": sha256(store.folder / MANIFEST),
    }


def command_line(settings: TrainSettings) -> str:
    """The command that trains the same, without what only concerns how it runs and prints."""
    asked = dataclasses.replace(settings, resume=True, overwrite=False)
    return asked.command_line("train")


def save(aligner: Aligner, out: Path) -> None:
    """Write the aligner elsewhere, then move its files into place, the config last."""
    aligner.eval().requires_grad_(False)
    partial = out / "training" / "aligner.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    aligner.save_pretrained(partial)
    for name in ("README.md", WEIGHTS, CONFIG):
        os.replace(partial / name, out / name)
    partial.rmdir()
