"""A sweep in the processes of a cluster of Ray, which is killed and goes on."""

import contextlib
import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from kvalign.aligners import Aligner
from kvalign.app.cli.main import main
from kvalign.cache.sizes import CacheSizes
from kvalign.training.settings import TuneSettings

pytest.importorskip("ray")

from ray.cluster_utils import Cluster


def ended(shown: str) -> list[str]:
    """The trials that have a line of their end, all five reports made, in `shown`."""
    return re.findall(r"^trial (\d+) finished after report 5 of 5: ", shown, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def killed(recorded, tmp_path_factory) -> SimpleNamespace:
    """A sweep of two small trials, with a cluster of its own, that Ctrl-C ended when the first had
    ended; then its folder was moved. It comes before `cluster`: one that is there would be taken.
    """
    out = tmp_path_factory.mktemp("sweep") / "out"
    small = dict(num_trials=2, max_epochs=1, hidden_sizes=(4, 8), max_batch_size=64)
    small |= dict(num_concurrent=1, grace_reports=6)
    settings = TuneSettings(target="key", data=recorded.folder, out=out, **small)
    words = settings.command_line("tune").split()[1:]
    command = [sys.executable, "-m", "kvalign", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        while run.poll() is None:
            states = out.glob("trials/experiment_state-*.json")
            if any("TERMINATED" in file.read_text() for file in states):
                run.send_signal(signal.SIGINT)
                break
            time.sleep(0.1)
        said = run.stderr.read()
    assert run.returncode == 130, said
    assert f"kept in {out / 'trials'}; to go on: kvalign {' '.join(words)}" in said
    assert not (out / "result.json").exists()
    moved = out.rename(out.with_name("moved"))
    words = [str(moved) if word == str(out) else word for word in words]
    return SimpleNamespace(out=moved, words=words, said=said)


@pytest.fixture(scope="module")
def cluster():
    """The address of one that is there already."""
    started = Cluster(True, head_node_args=dict(num_cpus=2, include_dashboard=False))
    yield started.address
    started.shutdown()


@pytest.fixture(scope="module")
def resumed(killed, cluster) -> SimpleNamespace:
    """The same sweep, run again."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        assert main([*killed.words, "--json", "--ray-address", cluster]) == 0
    return SimpleNamespace(result=json.loads(printed.getvalue()), said=said.getvalue())


@pytest.mark.ray
@pytest.mark.slow
def test_a_resumed_sweep_does_not_repeat_a_finished_trial(killed, resumed):
    assert ended(killed.said) == ["000"]
    assert ended(resumed.said) == ["001"]
    assert f"\n2 trials in {killed.out}, 0 stopped early, " in resumed.said
    assert [x.name for x in (killed.out / "trials" / "000" / "csv").iterdir()] == ["version_0"]
    with open(killed.out / "reports.csv") as file:
        found = [(row["trial"], row["report"]) for row in csv.DictReader(file)]
    assert sorted(found) == [(t, str(n)) for t in ("000", "001") for n in range(1, 6)]


@pytest.mark.ray
@pytest.mark.slow
def test_the_aligner_has_the_best_trial_s_settings(recorded, resumed):
    result = resumed.result
    assert [trial["state"] for trial in result["trials"]] == ["finished"] * 2
    best = min(result["trials"], key=lambda trial: trial["val_loss"])
    assert result["best"] == best
    aligner = Aligner.from_pretrained(result["aligner"])
    aligner.check(recorded.model, CacheSizes(15, 4, 1))
    trained = aligner.config.training["key"]
    for name in ("hidden1", "hidden2"):
        assert trained["settings"][f"key_{name}"] == aligner.config.sizes[f"key_{name}"]
        assert trained["settings"][f"key_{name}"] == best[name]
    assert trained["settings"]["batch_size"] == best["batch_size"]
    assert trained["settings"]["lr"] == best["lr"]
    assert trained["val_loss"] == result["aligner_val_loss"]
    assert trained["val_loss"] == pytest.approx(best["val_loss"], rel=1e-5)


@pytest.mark.ray
@pytest.mark.slow
def test_a_finished_sweep_is_left_alone(killed, resumed, capsys):
    made = {path: path.stat().st_mtime_ns for path in killed.out.rglob("*")}
    assert main(killed.words) == 0
    printed = capsys.readouterr()
    said, *wrote = printed.err.splitlines()
    assert said == f"{killed.out} already has this sweep, finished: nothing to do"
    assert [line.split(maxsplit=1)[0] for line in wrote] == ["wrote", "next:"]
    lines = [line.split() for line in printed.out.splitlines() if line.strip()]
    assert lines[1][:2] == ["trial", "hidden1"]
    assert sorted(line[0] for line in lines[3:]) == ["000", "001"]
    assert main([*killed.words, "--seed", "1"]) == 2
    assert "with other settings (seed is 0 there, 1 now)" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in killed.out.rglob("*")} == made
