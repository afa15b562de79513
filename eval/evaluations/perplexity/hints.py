"""Warning about a perplexity so high that the text, or the tokenizer, may not fit the model."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.tables import label_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_checked
from kvalign.methods.base import Method
from kvalign.methods.reencoding import Reencoding
from kvalign.models.loading import LoadedModel

log = logging.getLogger(__name__)

FAR = 4  # times the perplexity of a card


class _Facts(BaseModel):
    """Fields that are read of a model's `pretrain.json`."""

    train_loss_nats: float


def hint_at_wrong_text(
    rows: Sequence[Row], methods: Sequence[Method], loaded: LoadedModel, corpus: str
) -> None:
    """Warn, once, if the intervals of all perplexities lie above the order of magnitude of the
    vocabulary, or far above those of the cards. Too few labels for an interval give no warning.
    """
    vocab_size, best = loaded.model.config.vocab_size, min(rows, key=lambda row: row["low"])
    if best["low"] > 10 ** math.floor(math.log10(vocab_size)):
        _warn(best, f"about that of guessing among {vocab_size} tokens", corpus)
        return
    of_model = _of_model(loaded.spec.name)
    pairs = [
        (row, _expected_loss(method, of_model)) for row, method in zip(rows, methods, strict=True)
    ]
    ratios = [(row["low"] / math.exp(nats), row, nats) for row, nats in pairs if nats is not None]
    if not ratios:
        return
    ratio, row, nats = min(ratios, key=lambda one: one[0])
    if ratio > FAR:
        whose = f"aligner {row['aligner']}" if row["aligner"] else loaded.spec.name
        _warn(row, f"far above the {math.exp(nats):.4g} on the card of {whose}", corpus)


def _warn(row: Row, what: str, corpus: str) -> None:
    line = f"perplexity {row['perplexity']:.4g} of {label_of(row)} is {what}: corpus {corpus!r}"
    log.warning(
        "%s, or its encoding, may be the wrong text for this model, or the tokenizer may not "
        "belong to the model",
        line,
    )


def _expected_loss(method: Method, of_model: float | None) -> float | None:
    """The loss in nats a token that a card has of such a method on text like the training's."""
    aligner: Aligner | None = getattr(method, "aligner", None)
    if aligner is None:
        return of_model if isinstance(method, Reencoding) else None
    parts = [part for part in aligner.config.training.values() if isinstance(part, dict)]
    losses = [part["val_nll"] for part in parts if isinstance(part.get("val_nll"), float)]
    return max(losses, default=None)


def _of_model(name: str) -> float | None:
    """The loss in nats a token at the end of a pretraining of ours; None for any other model."""
    path = (checkpoints.model_path(name) or Path(name)) / "pretrain.json"
    try:
        return read_checked(_Facts, path).train_loss_nats if path.is_file() else None
    except UserError:
        return None
