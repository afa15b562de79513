"""One resumable run: new, unfinished, finished, or another."""

import pytest

from kvalign.foundation.errors import ExistsError
from kvalign.foundation.runs import ResumableRun

CONFIG = {"settings": {"lr": 0.1, "device": "cpu", "sizes": (1, 2)}, "data": {"sha256": "ab"}}


def run_in(folder, **changes):
    config = {**CONFIG, "settings": CONFIG["settings"] | changes}
    return ResumableRun(folder, config, free=("device",))


def test_states_of_one_run(tmp_path):
    run = run_in(tmp_path / "run")
    assert run.state() == "new" and run.result() == {}
    run.begin()
    assert run.state() == "unfinished"
    run.finish({"loss": 0.5})
    assert run.state() == "finished" and run.result() == {"loss": 0.5}
    assert run_in(tmp_path / "run", device="cuda").state() == "finished"  # a free setting
    run.begin()  # anew
    assert run.state() == "unfinished"


def test_another_run_is_refused_with_what_differs(tmp_path):
    run_in(tmp_path).begin()
    with pytest.raises(ExistsError, match="lr is 0.1 there, 0.2 now"):
        run_in(tmp_path, lr=0.2).state()


def test_other_files_are_refused(tmp_path):
    (tmp_path / ".lock").touch()
    assert run_in(tmp_path).state() == "new"
    (tmp_path / "diary.txt").touch()
    with pytest.raises(ExistsError, match="holds other files"):
        run_in(tmp_path).state()
