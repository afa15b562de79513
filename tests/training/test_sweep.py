"""Sweeps: what a trial reports, what is left of it, and a whole one that was killed and resumed."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvalign.aligners import Aligner
from kvalign.app.cli.main import main
from kvalign.cache.sizes import CacheSizes
from kvalign.training import train_network
from kvalign.training.kinds import NetworkSettings
from kvalign.training.settings import TuneSettings
from kvalign.training.sweep import settings_at

pytest.importorskip("ray")

from kvalign.training.sweep_ray import PLACE, Reports, line, scheduler, train_trial

POINT = {"hidden1": 8, "hidden2": 4, "batch_size": 32, "lr": 0.01}


@pytest.fixture
def base(recorded, tmp_path) -> NetworkSettings:
    return NetworkSettings(
        data=recorded.folder, out=tmp_path / "a", target="value", max_epochs=2, accelerator="cpu"
    )


@pytest.mark.parametrize(("batch_size", "max_steps"), [(32, 7), (512, None)])
def test_a_trial_is_the_training_run_of_its_settings(base, tmp_path, batch_size, max_steps):
    """And announces from the first report on how many there will be."""
    base = dataclasses.replace(base, max_steps=max_steps)
    settings = settings_at(base, POINT | {"batch_size": batch_size})
    sent: list[dict] = []
    train_trial(settings, tmp_path / "trial", Reports(sent.append, settings.vals_per_epoch))
    assert [report["report"] for report in sent] == list(range(1, len(sent) + 1))
    assert {report["max_reports"] for report in sent} == {len(sent)}
    assert [report["is_last"] for report in sent] == [False] * (len(sent) - 1) + [True]
    assert 1 <= sent[0][PLACE] <= sent[-1][PLACE] <= 2 * settings.vals_per_epoch
    found = train_network(settings)["value"]
    assert found["settings"]["value_hidden1"] == POINT["hidden1"]
    assert found["settings"]["lr"] == POINT["lr"]
    assert min(report["val_loss"] for report in sent) == pytest.approx(found["val_loss"], rel=1e-5)


def test_a_trial_that_fails_before_it_has_settings_has_a_line():
    trial = SimpleNamespace(config={}, last_result=None, metric_analysis={})
    assert line([trial], trial, "failed").endswith(" failed: no val loss")


def test_a_killed_trial_reports_what_an_undisturbed_one_does(base, tmp_path):
    """Killed at its first report, and at the end of an epoch."""
    settings = settings_at(base, POINT)
    expected: list[dict] = []
    train_trial(settings, tmp_path / "undisturbed", Reports(expected.append, 5))
    assert len(expected) == 10
    for num_sent in (1, 5):

        def until_killed(report: dict, last: int = num_sent) -> None:
            if report["report"] == last:
                raise KeyboardInterrupt

        folder = tmp_path / f"killed-{num_sent}"
        with pytest.raises(KeyboardInterrupt):
            train_trial(settings, folder, Reports(until_killed, 5))
        found: list[dict] = []
        train_trial(settings, folder, Reports(found.append, 5))
        assert [r | {"seconds": 0} for r in found] == [r | {"seconds": 0} for r in expected]


def tune_settings(data: Path, out: Path, **changes) -> TuneSettings:
    return TuneSettings(**{"target": "key", "data": data, "out": out, **changes})


def ended(shown: str) -> list[str]:
    """The trials that have a line of their end, all five reports made, in `shown`."""
    return re.findall(r"^trial (\d+) finished after report 5 of 5: ", shown, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def resumed(recorded, tmp_path_factory) -> SimpleNamespace:
    """A sweep of two small trials that was killed when the first had ended, and run again."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    small = dict(num_trials=2, max_epochs=1, hidden_sizes=(4, 8), max_batch_size=64)
    small |= dict(num_concurrent=1, scheduler="none")
    words = tune_settings(recorded.folder, out, **small).command_line("tune").split()[1:]
    killed = subprocess.Popen(
        [sys.executable, "-m", "kvalign", *words], stderr=subprocess.PIPE, text=True
    )
    while killed.poll() is None:
        if any("TERMINATED" in f.read_text() for f in out.glob("trials/experiment_state-*.json")):
            os.kill(killed.pid, signal.SIGKILL)
        time.sleep(0.1)
    assert killed.stderr is not None
    with killed.stderr as stderr:
        shown = stderr.read()
    assert killed.returncode == -signal.SIGKILL, shown
    assert not (out / "result.json").exists()
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        assert main([*words, "--json"]) == 0
    after = SimpleNamespace(stdout=printed.getvalue(), stderr=said.getvalue())
    return SimpleNamespace(out=out, words=words, before=shown, after=after)


@pytest.mark.ray
@pytest.mark.slow
def test_a_resumed_sweep_does_not_repeat_a_finished_trial(resumed):
    assert ended(resumed.before) == ["000"]
    assert ended(resumed.after.stderr) == ["001"]
    assert f"\n2 trials in {resumed.out}, 0 stopped early, " in resumed.after.stderr
    assert [path.name for path in (resumed.out / "trials" / "000" / "csv").iterdir()] == [
        "version_0"
    ]
    with open(resumed.out / "reports.csv") as file:
        found = [(row["trial"], row["report"]) for row in csv.DictReader(file)]
    assert sorted(found) == [(t, str(n)) for t in ("000", "001") for n in range(1, 6)]


@pytest.mark.ray
@pytest.mark.slow
def test_the_aligner_has_the_best_trial_s_settings(recorded, resumed):
    result = json.loads(resumed.after.stdout)
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
def test_a_finished_sweep_is_left_alone(resumed, capsys):
    made = {path: path.stat().st_mtime_ns for path in resumed.out.rglob("*")}
    assert main(resumed.words) == 0
    printed = capsys.readouterr()
    said, *wrote = printed.err.splitlines()
    assert said == f"{resumed.out} already has this sweep, finished: nothing to do"
    assert [line.split(maxsplit=1)[0] for line in wrote] == ["wrote", "next:"]
    lines = [line.split() for line in printed.out.splitlines() if line.strip()]
    assert lines[1][:2] == ["trial", "hidden1"]
    assert sorted(line[0] for line in lines[3:]) == ["000", "001"]
    assert main([*resumed.words, "--seed", "1"]) == 2
    assert "with other settings (seed is 0 there, 1 now)" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in resumed.out.rglob("*")} == made


def test_asha_stops_what_is_behind_at_the_same_place_and_never_at_the_end():
    asha = scheduler(tune_settings(Path("caches"), Path("sweep"), max_epochs=1, grace_reports=2))
    asha.set_search_properties("val_loss", "min")
    ahead, behind = (SimpleNamespace(trial_id=name) for name in ("ahead", "behind"))
    actions = {}
    for trial, loss in ((ahead, 0.1), (behind, 0.2)):
        asha.on_trial_add(None, trial)
        actions[trial.trial_id] = [
            asha.on_trial_result(None, trial, {PLACE: n, "val_loss": loss}) for n in range(1, 6)
        ]
    assert actions == {
        "ahead": ["CONTINUE"] * 5,
        "behind": ["CONTINUE", "STOP", "CONTINUE", "STOP", "CONTINUE"],
    }
