"""Levels of weights of 4 bits: which a group of stored weights lies on, or which are nearest."""

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale
_CLOSE = 1e-3  # steps that a weight may lie beside a level and count as lying there


def levels_of(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Even levels of each group, and the level nearest to each weight: w = low + q step.

    If all weights of a group lie on at most 16 even levels, as after storage in 4 bits, these are
    its levels.

    Args:
        weight: [N, K], K a multiple of `GROUP`.

    Returns:
        q [N, K] of 0 to 15 uint8; step and low [N, K / GROUP] float32.
    """
    groups = weight.detach().float().reshape(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    offset = groups - low
    step = (high - low) / 15
    if has_levels(weight):
        step = _even_steps(offset, high - low)
    q = (offset / step.clamp_min(1e-30)).round_().clamp_(0, 15).to(torch.uint8)
    return q.view(weight.shape), step.view(len(weight), -1), low.view(len(weight), -1)


def _even_steps(offset: Tensor, span: Tensor) -> Tensor:
    """The greatest number of steps, at most 15, on whose levels all of a group lie, as its step;
    where there is none, 15.

    Args:
        offset: [G, GROUP] weights less the least of their group.
        span: [G, 1] the greatest of them.
    """
    step = span / 15
    groups = torch.arange(len(span), device=span.device)
    for num in range(15, 0, -1):
        tried = span[groups] / num
        steps = offset[groups] / tried.clamp_min(1e-30)
        fits = ((steps - steps.round()).abs() < _CLOSE).all(1)
        step[groups[fits]] = tried[fits]
        groups = groups[~fits]
        if not len(groups):
            break
    return step


def has_levels(weight: Tensor) -> bool:
    """Return whether the first groups of weights lie on at most 16 even levels each."""
    groups = weight.detach().flatten()[: 64 * GROUP].float().view(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    steps = (groups - low) / _even_steps(groups - low, high - low).clamp_min(1e-30)
    return bool(((steps - steps.round()).abs() < _CLOSE).all())
