"""Files are whole or not at all; a folder has one writer; JSON is checked field by field."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
from helpers.tiny_corpus import TEXT
from pydantic import BaseModel

from kvalign.app.cli.main import main
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import (
    checked,
    locked,
    read_json,
    write_json,
    write_together,
    write_whole,
)

BLOW = Path(helpers.__file__).parent / "blow"
WRITES = """
from pathlib import Path
from kvalign.foundation.files import write_together
names = ("z", "config", "b")
write_together(Path("out"), lambda folder: [(folder / x).write_text(x) for x in names], "config")
"""


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write(partial):
        partial.write_text("half")
        raise RuntimeError("the stream writer failed")

    with pytest.raises(OSError, match="cannot write .*file: the stream writer failed"):
        write_whole(path, write)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_files_that_are_written_together_are_whole_when_the_last_is_there(tmp_path):
    """kill -9 before each change of a file in turn; the next run leaves what it leaves alone."""
    out, whole = tmp_path / "out", {name: name for name in ("z", "config", "b")}

    def killed(at):
        watched = dict(FAULTS_FOLDER=str(out), FAULTS_COUNT=str(tmp_path / f"{at}.count"))
        paths = os.pathsep.join((str(BLOW), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, **watched, "PYTHONPATH": paths, "FAULTS_AT": str(at)}
        words = [sys.executable, "-c", WRITES]
        run = subprocess.run(words, cwd=tmp_path, env=environment, start_new_session=True)
        return run.returncode == -signal.SIGKILL

    def there():
        return {path.name: path.is_file() and path.read_text() for path in out.iterdir()}

    def write(folder):
        for name in whole:
            (folder / name).write_text(name)

    out.mkdir()
    for at in itertools.count(1):
        (out / "config").unlink(missing_ok=True)
        if not killed(at):
            break
        assert "config" not in there() or there() == whole
        write_together(out, write, "config")
        assert there() == whole
    assert at > 8


def test_what_writers_leave_beside_a_file_is_removed_with_it(tmp_path):
    def write(partial):
        partial.with_name(".tmpX").write_text("a library's own")
        raise OSError("disk full")

    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            write_whole(tmp_path / "out" / "weights", write)
        assert list(tmp_path.iterdir()) == []  # the folder was made for it
    (tmp_path / "mine").mkdir()
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "mine" / "weights", write)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_json_is_read_as_it_was_written_and_checked_by_field(tmp_path):
    class Point(BaseModel):
        x: int
        y: int

    path = tmp_path / "point.json"
    write_json(path, {"x": 1, "y": 2})
    assert checked(Point, read_json(path), path) == Point(x=1, y=2)
    write_json(path, {"x": "left"})
    with pytest.raises(UserError, match=r"point\.json: x: .*got 'left'; y: Field required$"):
        checked(Point, read_json(path), path)
    write_json(path, [])
    with pytest.raises(UserError, match=r"point\.json must hold a JSON object, found list"):
        read_json(path)


def fail(folder, error, made, kept=str):
    """A run that writes a file and then fails."""
    with locked(folder, kept):
        (folder / made).parent.mkdir(exist_ok=True)
        (folder / made).write_text("half")
        raise error


@pytest.mark.parametrize("error", [UserError("no"), ModuleNotFoundError("no", name="ray")])
def test_a_run_that_is_refused_leaves_nothing(error, tmp_path):
    with pytest.raises(type(error)):
        fail(tmp_path / "a" / "b" / "out", error, "training/x")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").write_text("mine")
    with pytest.raises(type(error)):
        fail(tmp_path / "mine", error, "config.json")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "kept"]


@pytest.mark.parametrize("error", [UserError("no"), OSError("full")])
def test_what_is_of_use_stays(error, tmp_path):
    for kept in ("2 shards", ""):
        with pytest.raises(type(error)):
            fail(tmp_path / "out", error, "shard", lambda kept=kept: kept)
        assert (tmp_path / "out" / "shard").exists() == bool(kept)
        (tmp_path / "out" / "shard").unlink(missing_ok=True)


def test_what_a_killed_run_was_writing_is_removed_by_the_next(tmp_path):
    (tmp_path / "training").mkdir()
    stale = [tmp_path / ".x.partial.json", tmp_path / "training" / ".best.ckpt.partial"]
    stale[0].write_text("half")
    stale[1].mkdir()
    (stale[1] / ".tmpX").write_text("half")
    with locked(tmp_path):
        assert not any(path.exists() for path in stale)
    assert (tmp_path / "training").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["gen-data", "--corpus", "text:words.txt", "--num-tokens", "3000"],
        ["pretrain", "--num-tokens", "1000", "--vocab-size", "300"],
        ["eval", "run", "quick"],
    ],
    ids=lambda argv: argv[0],
)
def test_two_runs_into_one_folder_are_refused(argv, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text(TEXT * 4)
    with locked(Path("out")):
        assert main([*argv, "--out", "out"]) == 2
    assert "another run is writing to out" in capfd.readouterr().err
    assert [p.name for p in Path("out").iterdir()] == [".lock"]
