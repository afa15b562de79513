"""Peak memory of work whose allocations are known."""

import gc

import pytest
import torch

from kvalign.eval.evaluations.latency.rows import peak_bytes

MB = 10**6
DEVICES = ["cpu"]
DEVICES += [
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    )
]


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


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("device", DEVICES)
def test_releases_of_earlier_tensors_are_not_taken_off(device, no_collector):
    """Of those in a cycle, which the collector finds at any time."""

    def leave_a_cycle():
        cycle = [allocate(device, 40)]
        cycle.append(cycle)

    def collect_and_allocate():
        gc.collect()
        allocate(device, 40)

    peak_bytes(torch.device(device), leave_a_cycle)  # CPU: only what it has seen come can go
    assert peak_bytes(torch.device(device), collect_and_allocate) == pytest.approx(
        40 * MB, rel=0.01
    )


def test_other_devices_tell_nothing():
    assert peak_bytes(torch.device("mps"), lambda: pytest.fail("called for nothing")) is None
