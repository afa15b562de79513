"""Non-finite logits: where they come from, in one line."""

import math

import torch
from torch import Tensor, nn

from kvalign.foundation.errors import RunError, UserError
from kvalign.methods.base import Method
from kvalign.models.weights import check_finite


def no_token(logits: Tensor, method: Method) -> RunError:
    """Return the error for logits [B, V] from which no token can be chosen."""
    if logits.isfinite().all():
        return RunError(
            "no token is left to choose: penalties or no_repeat_ngram_size exclude all of them"
        )
    return RunError(f"this stream has ended: {reason(method)}")


MOST_LOSS = 300.0
"""Nats, far above any trained model's; its exp, and that of a difference, are finite."""


def check_losses(losses: Tensor, method: Method, most: float = MOST_LOSS) -> None:
    """Raise RunError unless losses [N] in nats are finite, by default with their perplexity."""
    if not losses.isfinite().all():
        raise RunError(f"{method.title} cannot be scored: {reason(method)}")
    if (worst := losses.max().item()) > most:
        raise RunError(
            f"{method.title} cannot be scored: a token costs {worst:.3g} nats, more than {most:g}: "
            "are these the weights of a trained model?"
        )


def perplexity_of(nats: float) -> float:
    """exp of a mean loss; RunError if that is not finite."""
    if not nats <= MOST_LOSS:
        raise RunError(
            f"no perplexity: a token costs {nats:.3g} nats, more than {MOST_LOSS:g}: are these the "
            "weights of a trained model?"
        )
    return math.exp(nats)


def reason(method: Method) -> str:
    """Reason why the logits of a method are non-finite: the model's weights, the aligner's, or else
    the precision.
    """
    aligner = getattr(method, "aligner", None)
    parts: dict[str, nn.Module] = {f"the model {method.spec.name}".rstrip(): method.model}
    if isinstance(aligner, nn.Module):
        parts[f"the aligner {getattr(aligner, 'source', None) or ''}".rstrip()] = aligner
    for name, part in parts.items():
        try:
            check_finite(part.state_dict().items(), f"the weights of {name}")
        except UserError as error:
            return str(error)
    dtype = str(method.model.dtype).removeprefix("torch.")
    which = " and ".join(parts)
    if method.model.dtype == torch.float32:
        return f"the logits are not finite, though the weights of {which} are: they overflow"
    return f"the logits are not finite in {dtype}: use another precision, such as float32 (--dtype)"
