"""The texts of `kvalign eval attention`, and the figures that are made of the weights."""

from itertools import islice

import torch
from torch import Tensor

from kvalign.data_gen.chunks import cut_chunks
from kvalign.data_gen.corpora import token_pieces
from kvalign.eval.evaluations.attention import AttentionSettings
from kvalign.eval.evaluations.attention.weights import EDGE, num_tokens
from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.eval.protocol.statistics import mean_interval
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.loading import LoadedModel
from kvalign.models.prefix_tokens import prefix_ids, with_prefix

LOCAL_LAYERS = 2  # the first two of a model look at what is near (Xiao et al. 2024)


def read_texts(loaded: LoadedModel, settings: AttentionSettings) -> Tensor:
    """The first pieces of the corpus's test part, one after another, each of what the largest cache
    needs, its first tokens replaced by what the tokenizer puts before a text: [num_texts, T] int64,
    on the model's device.

    Raises:
        UserError: it has fewer.
    """
    progress.phase(f"reading {settings.corpus}")
    length = num_tokens(max(settings.cache_sizes), settings.num_steps)
    pieces = token_pieces(settings.corpus, loaded.tokenizer, "test")
    texts = list(islice(cut_chunks(pieces, length, length), settings.num_texts))
    if len(texts) < settings.num_texts:
        raise UserError(
            f"corpus {settings.corpus!r} is too short: it has {len(texts)} texts of {length} "
            f"tokens, {settings.num_texts} are needed (--num-texts): name a longer one, or smaller "
            "--cache-sizes"
        )
    ids = torch.tensor(texts, device=loaded.model.device)
    return with_prefix(ids, prefix_ids(loaded.tokenizer))


def row(method: Method, before: Tensor, after: Tensor) -> Row:
    """The row of a method, from weights [B, L, H, bins]."""
    phases = {"before": before, "after": after}
    found: Row = sizes_of(method)
    for part, bins in {"first": [0], "four": range(EDGE), "latest": range(-EDGE, 0)}.items():
        for phase, weights in phases.items():
            layers = weights[:, LOCAL_LAYERS:] if weights.shape[1] > LOCAL_LAYERS else weights
            shares = 100 * layers[..., list(bins)].sum(-1).mean((1, 2))  # [B]
            low, high = mean_interval(shares)
            name = f"{part}_{phase}"
            found |= {name: shares.mean().item(), f"{name}_low": low, f"{name}_high": high}
    for phase, weights in phases.items():  # what the pictures show
        mean = 100 * weights.mean(0)  # [L, H, bins]
        by_entry, by_head = mean.mean(1), mean[..., :EDGE].sum(-1)
        found[phase] = {"by_entry": _short(by_entry), "by_head": _short(by_head)}
    return found


def _short(shares: Tensor) -> list[list[float]]:
    """Four digits of each: a document holds thousands."""
    return [[float(f"{value:.4g}") for value in line] for line in shares.tolist()]
