"""Folder of a shipped model with other weights and the same embedding, as after a merged LoRA."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvalign import checkpoints

_CHANGED = ("down_proj", "v_proj")


def copy_of(name: str, folder: Path) -> Path:
    """Copy of a shipped model, as a folder."""
    shutil.copytree(checkpoints.FOLDER / name, folder)
    return folder


def change(folder: Path, noise: float = 0.5) -> None:
    """Add noise, in standard deviations, to the weights that a LoRA usually changes."""
    path, rng = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights = load_file(path)
    for name in [name for name in weights if any(part in name for part in _CHANGED)]:
        x = weights[name].float()
        added = noise * x.std() * torch.randn(x.shape, generator=rng)
        weights[name] = (x + added).to(weights[name].dtype)
    save_file(weights, path, {"format": "pt"})
