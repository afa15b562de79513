"""Presses of kvpress (NVIDIA) as policies: the press gives the scores, KV-Align evicts and places.

Tested with kvpress 0.5.5: the presses that score by keys and values (`KnormPress`, `KeyDiffPress`,
`LagKVPress`, `CURPress`, `RandomPress`), and `TOVAPress`, which also reads attention weights.
"""

from typing import Any

import torch
from torch import Tensor

from kvalign.foundation.errors import UserError
from kvalign.policies.base import Policy, Seen

PROBE = (1, 2, 64, 8)


def policy_of(press: Any, reads_weights: bool = False) -> type[Policy]:
    """Policy with the scores of a press: `POLICIES["knorm"] = policy_of(KnormPress())`.

    Args:
        press: a `ScorerPress`; its compression ratio is not used.
        reads_weights: whether it reads `attentions`. It gets those of the step's queries, the mean
            over those that share a head of keys.

    Raises:
        UserError: it needs more, such as hidden states or the attention module.
    """
    title = type(press).__name__
    keys = torch.rand(PROBE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weights = keys[:, :, None, :, 0].softmax(-1) if reads_weights else None
    try:
        scores = press.score(None, None, keys, keys, weights, {})
    except Exception as error:
        inputs = "keys, values and attention weights" if reads_weights else "keys and values"
        raise UserError(
            f"{title} cannot be a policy: it does not score by {inputs} alone "
            f"({type(error).__name__})"
        ) from error
    if scores.shape != keys.shape[:3]:
        raise UserError(f"{title} cannot be a policy: its scores are {tuple(scores.shape)}")

    class Pressed(Policy):
        name = title
        about = f"evicts the entry with the lowest score of {title} of kvpress"

        def score(self, seen: Seen) -> Tensor:
            rows = [_score_row(press, seen, row) for row in range(len(seen.num_fed))]
            return torch.stack(rows)

    Pressed.reads_weights = reads_weights
    return Pressed


def _score_row(press: Any, seen: Seen, row: int) -> Tensor:
    """[H, S] of one row, which a press gets alone: what it lacks on the left is no entry."""
    num = seen.keys.shape[2]
    lacks = max(0, num - seen.num_fed[row])
    keys, values = (x[row : row + 1, :, lacks:] for x in (seen.keys, seen.values))
    weights = None if seen.weights is None else seen.weights[row : row + 1, ..., lacks:]
    scores = press.score(None, None, keys, values, weights, {})[0]
    return torch.nn.functional.pad(scores.float(), (lacks, 0))
