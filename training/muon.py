"""Muon on a CPU without instructions for bfloat16, on which torch's takes many times as long."""

import math
from typing import Any

import torch
from torch import Tensor


def has_bfloat16(device: torch.device) -> bool:
    """Return whether products in bfloat16 are fast on a device."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with products in float32, and the rate of `match_rms_adamw`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            momentum, lr = group["momentum"], group["lr"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(mean, momentum), group["ns_coefficients"])
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr * 0.2 * math.sqrt(max(weight.shape)))


def orthogonal(update: Tensor, coefficients: tuple[float, float, float], steps: int = 5) -> Tensor:
    """Matrix nearest to an update [M, N] whose rows or columns are orthonormal, roughly: the
    Newton-Schulz iteration of Jordan 2024.
    """
    a, b, c = coefficients
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x
