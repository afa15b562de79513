"""Memory that cannot be had is said before it is asked for."""

import platform

import psutil
import pytest
import torch

from kvalign.app.cli.main import explain
from kvalign.foundation import memory
from kvalign.foundation.errors import UserError


def test_what_fits_and_what_does_not(monkeypatch):
    assert memory.free_bytes() > 10**6
    memory.check_room(1, "weights")
    with pytest.raises(
        UserError, match=r"^weights need 1e\+03 EB of memory, but only .* are free$"
    ):
        memory.check_room(10**21, "weights")
    monkeypatch.setattr(memory, "free_bytes", lambda: None)  # a system that does not tell
    memory.check_room(10**21, "weights")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is of glibc")
def test_what_lies_between_things_in_use_is_given_back():
    blocks = [b"x" * 100_000 for _ in range(2000)]
    kept = blocks[::20]
    before = psutil.Process().memory_info().rss
    del blocks
    memory.give_back()
    assert before - psutil.Process().memory_info().rss > 100e6 and len(kept) == 100


def test_where_there_is_no_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    memory.give_back()


def test_sizes_in_words():
    words = [memory.size(x) for x in (0, 999, 1500, 2e9, 3e15)]
    assert words == ["0 B", "999 B", "1.5 kB", "2 GB", "3 PB"]


def test_the_words_of_the_allocator():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**13)
    code, message = explain(caught.value)
    assert code == 1 and message.startswith("not enough memory for 40000000000000 bytes at once")
