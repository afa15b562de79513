"""Sweeps: what a trial reports, and what is left of it; `test_sweep_on_ray.py` has a whole one."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvalign.training import train_network
from kvalign.training.settings import NetworkSettings, TuneSettings

pytest.importorskip("ray")

from kvalign.training.sweep_ray import (
    PLACE,
    Reports,
    line,
    scheduler,
    settings_at,
    train_trial,
    trial_of,
)

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


def test_a_trial_is_read_from_its_own_folder_wherever_ray_has_its_records(base, tmp_path):
    """Of a sweep that was moved, what Ray wrote after that is nowhere."""
    sent: list[dict] = []
    train_trial(settings_at(base, POINT), tmp_path / "007", Reports(sent.append, 5))
    there = SimpleNamespace(path="/no/such/007", config=POINT, error=None, metrics_dataframe=None)
    trial = trial_of(there, tmp_path)
    assert (trial.name, trial.reports) == ("007", sent) and trial.row["state"] == "finished"
    assert trial_of(there, tmp_path / "other").row["state"] == "failed"
    there.config = None  # it failed before its first report
    assert trial_of(there, tmp_path).row["state"] == "failed"


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


def test_asha_stops_what_is_behind_at_the_same_place_and_never_at_the_end():
    folders = dict(data=Path("caches"), out=Path("sweep"))
    asha = scheduler(TuneSettings(target="key", **folders, max_epochs=1, grace_reports=2))
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
