"""Positions at which the tokens of a full cache are computed. On learned positions a method that
encodes its window again has positions from 0 on. A table can lift the window to any: the newest
token may be computed at any position from C on that the model has. A model of few parameters is
better at some than at others, so the place of the window is chosen, by streams of training text,
for some cache sizes; others take that of the nearest (`AlignerConfig.position_at`).

A first round tries all candidates on the same labels. A second one, of other labels, holds the best
of them against the cache's own position, C. It is taken if the 95 % interval of the paired
difference says that it is better.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import TableAligner
from kvalign.cache.realigner import is_exact, realigner_of
from kvalign.foundation import progress
from kvalign.models.architectures import spec_of
from kvalign.training.judge import is_better, streamed
from kvalign.training.text import Texts

ROW_LABELS = 256
FIRST_ROWS, SECOND_ROWS = 8, 32
LIFTS = (16, 32, 48, 64, 96, 128)
LAST_SHARE, SHARES = 15 / 16, (31 / 32, 15 / 16, 7 / 8)
"""Few queries of a model's training have read what it writes at its last positions, and at the very
last one none but its own. So entries are lifted to this share of the context length, and the places
of a larger cache may be squeezed onto one of these."""
STEP, LARGE, LARGE_STEP = 32, 256, 64
"""Sizes are multiples of a step, which is longer for large ones: neighbours are alike."""


def place(aligner: TableAligner, model: PreTrainedModel, text: Texts, seed: int) -> dict[str, Any]:
    """Give an aligner the positions that do best, in `config.positions`.

    Returns:
        `placed`: a row a size: `cache_size`, `position`, `tried` (positions) and `nll`, of each of
        these in nats per token in the first round. Nothing where positions cannot be chosen: rotary
        ones, of which only differences matter; a corpus of facts; entries that are moved.
    """
    if not _is_free(aligner, model) or text.is_recall:
        return {}
    progress.phase("placing")
    config, rng, rows = aligner.config, torch.Generator().manual_seed(seed), []
    last = last_position(config.chunk_len, model)
    for size in _sizes(config.largest_cache):

        def losses(positions: Sequence[int], num_rows: int, size: int = size) -> list[Tensor]:
            ids = {size: text.rows(rng, num_rows, size + 1 + ROW_LABELS)}
            of_positions = []
            for position in positions:
                new = {"positions": ((size, position),)}
                aligner.config = config.model_copy(update=new)
                options = {"num_sinks": config.num_sinks, "aligner": aligner}
                one = streamed(model, text, ids, "kvalign", **options)
                of_positions.append(one.flatten())
            return of_positions

        tried = _positions(size, last)
        nll = [x.mean().item() for x in losses(tried, FIRST_ROWS)]
        best = tried[nll.index(min(nll))]
        if best != size and not is_better(*losses((best, size), SECOND_ROWS)):
            best = size
        rows.append({"cache_size": size, "position": best, "tried": tried, "nll": nll})
    positions = tuple((row["cache_size"], row["position"]) for row in rows)
    aligner.config = config.model_copy(update={"positions": positions})
    return {"placed": rows}


def num_placed_tokens(aligner: TableAligner, model: PreTrainedModel, text: Texts) -> int:
    """Number of tokens that `place` counts for the progress, at most."""
    if not _is_free(aligner, model) or text.is_recall:
        return 0
    last = last_position(aligner.config.chunk_len, model)
    return sum(
        (size + 1 + ROW_LABELS) * (FIRST_ROWS * len(_positions(size, last)) + 2 * SECOND_ROWS)
        for size in _sizes(aligner.config.largest_cache)
    )


def last_position(chunk_len: int, model: PreTrainedModel) -> int:
    """Return the last position at which a table of so many positions has a token computed, unless
    measured otherwise.
    """
    spec = spec_of(model.config)
    if spec.family != "learned" or spec.context_len is None:
        return chunk_len - 1
    return min(chunk_len - 1, int(LAST_SHARE * spec.context_len))


def _is_free(aligner: TableAligner, model: PreTrainedModel) -> bool:
    """Return whether streams of an aligner may be computed anywhere, and are read in segments."""
    realigner = realigner_of(model, aligner)
    return aligner.config.family == "learned" and is_exact(
        model, aligner.config.largest_cache, realigner
    )


def _sizes(largest: int) -> list[int]:
    return [
        *range(STEP, min(LARGE, largest), STEP),
        *range(LARGE, largest, LARGE_STEP),
        largest,
    ]


def _positions(size: int, last: int) -> list[int]:
    """Positions to try, the size first."""
    if size > last:
        return [size, *(int(share * (size + 1)) for share in SHARES)]
    return [size, *(size + lift for lift in LIFTS if size + lift <= last)]
