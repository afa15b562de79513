"""Memory that cannot be had is said before it is asked for."""

import platform

import psutil
import pytest

from kvalign.foundation import machine
from kvalign.foundation.errors import UserError


def test_what_fits_and_what_does_not(monkeypatch):
    assert machine.free_bytes() > 10**6
    machine.check_room(1, "weights")
    with pytest.raises(
        UserError, match=r"^weights need 1e\+03 EB of memory, but only .* are free$"
    ):
        machine.check_room(10**21, "weights")
    monkeypatch.setattr(machine, "free_bytes", lambda: None)  # a system that does not tell
    machine.check_room(10**21, "weights")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is of glibc")
def test_what_lies_between_things_in_use_is_given_back():
    blocks = [b"x" * 100_000 for _ in range(2000)]
    kept = blocks[::20]
    before = psutil.Process().memory_info().rss
    del blocks
    machine.give_back()
    assert before - psutil.Process().memory_info().rss > 100e6 and len(kept) == 100
