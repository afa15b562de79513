"""Fixtures that all tests share; the models are read-only."""

import gc
import itertools
import os
from pathlib import Path

import pytest
import torch
from helpers.browser import DRIVER_WARNINGS, PAGES, launched
from helpers.smaller import UNDRAWN
from helpers.tiny_models import KINDS, VOCAB, tiny_model
from helpers.tiny_store import Recorded, record_tiny
from transformers import PreTrainedModel

from kvalign.app.sessions import conversation
from kvalign.memory import plan
from kvalign.methods import choice
from kvalign.models.fetched import MOVED_BY
from kvalign.models.loading import LoadedModel, load_model
from kvalign.steppers import stored

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `--device auto` is the CPU; `make test-gpu` is for a GPU
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have 80, and tables would obey
os.environ.update(RAY_worker_niceness="0")  # at Ray's own 15 they starve beside the other tests
numbers = itertools.count()
gc.set_threshold(10_000)  # collecting tests makes objects that stay


@pytest.fixture(scope="session", autouse=True)
def no_step_of_the_user():
    """A step that is stored in the user's own folder changes no test."""
    found = stored.is_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "is_empty", lambda: MOVED_BY not in os.environ or found())
        yield


@pytest.fixture(autouse=True)
def no_plan_of_the_user(tmp_path_factory, monkeypatch):
    """A plan that was measured by the user, or by another test, changes no test, and conversations
    measure none.
    """
    folder = tmp_path_factory.getbasetemp() / f"plans-{next(numbers)}"
    monkeypatch.setattr(plan, "cache_dir", lambda: folder)
    monkeypatch.setattr(conversation, "LARGEST_MEASURED", 0)


@pytest.fixture(scope="session", autouse=True)
def no_aligner_of_the_user():
    """An aligner that was trained in the folder of the tests changes none of them."""
    newest_first, here = choice.newest_first, Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            choice, "newest_first", lambda *of: [] if Path.cwd() == here else newest_first(*of)
        )
        yield


@pytest.fixture(scope="session")
def models() -> dict[str, PreTrainedModel]:
    return {kind: tiny_model(kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def model(request, models) -> PreTrainedModel:
    """Each architecture in turn."""
    return models[request.param]


@pytest.fixture(scope="module")
def loaded(request):
    """The default model, or a file's `MODEL`, with its tokenizer; a file's own, since tests change
    what it holds.
    """
    return load_model(getattr(request.module, "MODEL", "gpt2-mini"))


@pytest.fixture(scope="session")
def minis() -> dict[str, LoadedModel]:
    """The models that write text, with their tokenizers: as they were loaded, after each test."""
    return {name: load_model(name) for name in ("gpt2-mini", "llama-mini")}


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Recorded:
    """A small recording, which is only read."""
    return record_tiny(tmp_path_factory.mktemp("recorded") / "caches")


@pytest.fixture
def ids() -> torch.Tensor:
    """[2, 150] random ids, always the same: more than two contexts, seven caches."""
    return torch.randint(2, VOCAB, (2, 150), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def offline(monkeypatch):
    """The hub does not answer."""
    monkeypatch.setattr("kvalign.foundation.hub.is_reachable", lambda: False)


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without pictures."""
    for name, value in UNDRAWN.items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def short_runs(monkeypatch):
    """Rotary keys whose positions run on for 24 steps, not for 256: `verify` streams beyond."""
    for module in ("invariants.entries", "cache.realigner"):  # the first imports from the second
        monkeypatch.setattr(f"kvalign.{module}.LONG_RUN", 24)
    monkeypatch.setattr("kvalign.invariants.feeding.NUM_AFTER", 8)
    monkeypatch.setattr("kvalign.invariants.long_run.STRETCH", 16)


@pytest.fixture(scope="module")
def browser():
    """Chromium."""
    yield from launched()


def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
        if item.get_closest_marker("browser"):
            for warning in DRIVER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Let one worker drive the pages, one after the other: they have clocks of their own."""
    from xdist.scheduler import LoadFileScheduling

    class OneBrowser(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "pages" if file.endswith(PAGES) else file

    return OneBrowser(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish():
    gc.freeze()  # what was imported is not looked at again


def pytest_terminal_summary(terminalreporter, config):
    """Add what was skipped, and why, to the file that KVALIGN_SKIPPED names."""
    skipped = terminalreporter.stats.get("skipped", ())
    path = os.environ.get("KVALIGN_SKIPPED")
    if path and not hasattr(config, "workerinput"):  # workers of pytest-xdist report to it
        with Path(path).open("a", encoding="utf-8") as file:
            for report in skipped:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "unknown"
                file.write(f"{report.nodeid.partition('[')[0]}: {reason}\n")
