"""Files as the authors of KV-Align publish them, with random weights, and models that they fit."""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoTokenizer

from helpers.tiny_models import tiny_model
from kvalign import checkpoints

NUM_POSITIONS = 48


def random_network(
    hidden1, hidden2, num_layers=2, num_heads=2, head_dim=16, num_positions=NUM_POSITIONS
) -> dict:
    """What the authors' file holds, with random weights."""
    rng = torch.Generator().manual_seed(hidden1)
    nums = {"pos": (num_positions, 32), "blocks": (num_layers, 4), "heads": (num_heads, 8)}
    shapes = {f"emb_{name}.weight": shape for name, shape in nums.items()}
    widths = (head_dim + 44, hidden1, hidden2, head_dim)
    for i, (inner, outer) in enumerate(pairwise(widths), 1):
        shapes |= {f"fc{i}.weight": (outer, inner), f"fc{i}.bias": (outer,)}
    state = {name: 0.2 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return {"model_state_dict": state, "optimizer_state_dict": {"lr": 1e-3}, "val_losses": [0.1]}


def write_networks(folder: Path, names=("keys.pth", "values.pth")) -> None:
    """Files for the tiny models, of unequal hidden sizes."""
    torch.save(random_network(24, 12), folder / names[0])
    torch.save(random_network(10, 20), folder / names[1])


def save_model(folder: Path, kind: str, **changes) -> None:
    tiny_model(kind, **changes).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))
    tokenizer.save_pretrained(folder)
