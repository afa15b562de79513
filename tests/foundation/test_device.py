"""Clocks that wait for the device."""

import pytest
import torch

from kvalign.eval.evaluations.latency.timing import clocked
from kvalign.foundation.device import wait_for


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_clock_waits_before_and_after(kind, monkeypatch):
    done, device = [], torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "synchronize", done.append)
    assert clocked(device, done.append, "work") >= 0
    assert done == [device, "work", device]


def test_the_cpu_has_done_its_work(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("called"))
    wait_for(torch.device("cpu"))
