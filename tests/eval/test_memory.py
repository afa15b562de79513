"""Peak memory of work whose allocations are known."""

import pytest
import torch

from kvalign.eval.evaluations.latency.timing import peak_bytes

MB = 10**6
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def allocate(device, num_mb):
    return torch.empty(num_mb * MB // 4, device=device)  # 4 bytes an element


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_held_at_once_counts(device):
    def one_after_the_other():
        allocate(device, 40)
        allocate(device, 40)

    def at_once():
        first = allocate(device, 40)
        second = allocate(device, 20)
        del first
        return second, allocate(device, 30)

    before = allocate(device, 80)
    for work, num_mb in ((one_after_the_other, 40), (at_once, 60), (lambda: None, 0)):
        assert peak_bytes(torch.device(device), work) == pytest.approx(num_mb * MB, rel=0.01)
    del before
