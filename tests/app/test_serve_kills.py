"""kill -9 in the middle of sessions: each goes on from its last whole turn, and none is corrupt."""

import random

import pytest
from helpers.server_kills import attack_sessions


@pytest.mark.slow
def test_sessions_survive_kills(tmp_path):
    more = ("--memory", "500")
    found = attack_sessions(tmp_path / "talks", 1, random.Random(0), num_sessions=8, more=more)
    nothing: dict = {"corrupt": [], "lost": [], "left_over": []}
    assert found == {"command": "serve", "kills": 1, "same_result": True, **nothing}
