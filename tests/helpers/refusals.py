"""Wrong input and what must come of it: one line, an exit code that says whose fault it is, in
seconds, and nothing left behind.
"""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvalign import checkpoints
from kvalign.app.cli.main import main
from kvalign.foundation.errors import RunError, UserError

SECONDS = 10.0  # of work
MOST_SECONDS = 300.0  # by the clock, which runs on while others have the processor


@contextlib.contextmanager
def in_time(seconds=SECONDS):
    """Fail, whatever Python code is running, once it has worked, or waited, for so long."""

    def stop(*_):
        raise AssertionError(f"it needs over {seconds:g} s")

    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, seconds),
        signal.ITIMER_REAL: (signal.SIGALRM, MOST_SECONDS),
    }
    before = {name: signal.signal(name, stop) for name, _ in timers.values()}
    try:
        for timer, (_, most) in timers.items():
            signal.setitimer(timer, most)
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for name, handler in before.items():
            signal.signal(name, handler)


def refused(argv, message, capfd, code=2):
    """A command in the current folder, which must refuse."""
    assert not Path("pyproject.toml").exists()  # a folder of the test's own
    before = files_in(Path())
    with in_time():
        found = main(argv)
    captured = capfd.readouterr()
    assert (found, captured.out) == (code, ""), captured.err
    assert captured.err.count("\n") == 1, captured.err
    assert message in captured.err, captured.err
    assert "an error in KV-Align" not in captured.err and "\x1b" not in captured.err
    assert files_in(Path()) == before


def refuses(call, message, errors=(UserError, RunError)):
    """A call of Python's that must refuse."""
    with in_time(), pytest.raises(errors) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value), caught.value


def files_in(folder):
    """All that is in a folder, by name with size."""
    return {str(p): p.lstat().st_size if p.is_file() else 0 for p in Path(folder).rglob("*")}


def altered_aligner(folder, name="kvalign-gpt2-mini-table", config=(), weights=None):
    """A copy of a shipped aligner, with fields of its config set (None: left out), and its weights
    as a function of them changes them.
    """
    return _altered(checkpoints.aligner_path(name), folder, dict(config), weights)


def altered_model(folder, name="recall-gpt2", config=(), weights=None, files=()):
    """A copy of a shipped model; `files` has texts by name (None: left out)."""
    _altered(checkpoints.model_path(name), folder, dict(config), weights)
    for file, text in dict(files).items():
        path = folder / file
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return folder


def _altered(source, folder, config, weights):
    shutil.copytree(source, folder)
    for name in os.listdir(folder):
        os.chmod(folder / name, 0o644)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name, value in config.items():
        *above, last = name.split(".")
        place = values
        for part in above:
            place = place[part]
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    path.write_text(json.dumps(values))
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        changed = weights(tensors)
        if isinstance(changed, bytes):
            (folder / "model.safetensors").write_bytes(changed)
        else:
            save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder
