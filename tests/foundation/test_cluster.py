"""An address of a Ray cluster at which nothing answers is the user's to correct."""

import pytest

from kvalign.foundation.cluster import ray_session
from kvalign.foundation.errors import UserError

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("is_flag", [True, False])
def test_a_cluster_that_does_not_answer(is_flag, monkeypatch):
    pytest.importorskip("ray")
    if not is_flag:
        monkeypatch.setenv("RAY_ADDRESS", NOBODY)
    with (
        pytest.raises(UserError, match=f"no Ray cluster at '{NOBODY}'"),
        ray_session(NOBODY if is_flag else None),
    ):
        pass
