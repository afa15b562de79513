"""Memory that cannot be had is said before it is asked for."""

import pytest
import torch

from kvalign.app.cli.main import explain
from kvalign.foundation import memory
from kvalign.foundation.errors import UserError


def test_what_fits_and_what_does_not(monkeypatch):
    assert memory.free_bytes() > 10**6
    memory.check_room(1, "weights")
    with pytest.raises(UserError, match=r"^weights need 1e\+03 EB of memory, .* are free here$"):
        memory.check_room(10**21, "weights")
    monkeypatch.setattr(memory, "free_bytes", lambda: None)  # a system that does not tell
    memory.check_room(10**21, "weights")


def test_sizes_in_words():
    words = [memory.size(x) for x in (0, 999, 1500, 2e9, 3e15)]
    assert words == ["0 B", "999 B", "1.5 kB", "2 GB", "3 PB"]


def test_the_words_of_the_allocator():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**13)
    code, message = explain(caught.value)
    assert code == 1 and message.startswith("not enough memory for 40000000000000 bytes at once")
