"""Shipped reference language models, with an aligner for each. Every one has a card."""

from pathlib import Path

FOLDER = Path(__file__).parent
PURPOSES = {
    "gpt2-mini": "writes text",
    "llama-mini": "writes text",
    "context-gpt2": "writes text",
    "recall-gpt2": "for kvalign eval recall; writes no text",
    "recall-llama": "for kvalign eval recall; writes no text",
}
MODELS = tuple(PURPOSES)
ALIGNERS = (
    "kvalign-gpt2-mini-table",
    "kvalign-gpt2-mini-table-kl",
    "kvalign-gpt2-mini-table-network",
    "kvalign-gpt2-mini-network",
    "kvalign-gpt2-mini-network-tuned",
    "kvalign-gpt2-mini-network-rollout",
    "kvalign-gpt2-mini-network-rollout8",
    "kvalign-llama-mini-table",
    "kvalign-llama-mini-network",
    "kvalign-context-gpt2-table",
    "kvalign-context-gpt2-table-network",
    "kvalign-recall-gpt2-table",
    "kvalign-recall-gpt2-table-kl",
    "kvalign-recall-llama-table",
)
DEFAULT_ALIGNERS = {
    "gpt2-mini": "kvalign-gpt2-mini-table-network",
    "llama-mini": "kvalign-llama-mini-table",  # it changes nothing: rotation is enough
    "context-gpt2": "kvalign-context-gpt2-table-network",
    "recall-gpt2": "kvalign-recall-gpt2-table-kl",
    "recall-llama": "kvalign-recall-llama-table",  # as that
}


def model_path(name: str) -> Path | None:
    """Folder of a shipped model, or None for any other name."""
    return FOLDER / name if name in MODELS else None


def aligner_path(name: str) -> Path | None:
    """Folder of a shipped aligner by its own name, or None for any other name."""
    return FOLDER / name if name in ALIGNERS else None


def shipped_name(model: str) -> str:
    """Short name of a shipped model given by its folder; any other name unchanged."""
    path = Path(model)
    return path.name if path.parent == FOLDER and path.name in MODELS else model


def default_aligner(model: str) -> str | None:
    """Shipped aligner that a model has by default, given by its name or folder."""
    return DEFAULT_ALIGNERS.get(shipped_name(model))
