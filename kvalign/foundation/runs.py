"""Folder that one run fills: its description first, its result last. So an interrupted run is
distinguished from a finished one, and the same command continues it.

    FOLDER/run.json      written first: everything that the run depends on
    ...                  intermediate files
    FOLDER/result.json   written last; without it the run is unfinished
"""

import json
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any, Literal

from kvalign.foundation.errors import ExistsError, Interrupted
from kvalign.foundation.files import read_json, write_json

State = Literal["new", "unfinished", "finished"]
FORMAT = {"format": 1}
PART_OF_RUN = "KVALIGN_PART_OF_RUN"
"""In the environment of a suite's cell, for which the run speaks."""


class ResumableRun:
    """Run in `folder`, which need not exist yet.

    Args:
        folder: of this run only.
        config: everything that the run depends on: JSON values, in dicts.
        free: names of fields in it, at any depth, that may differ when the run is resumed.
        config_name, result_name: of the two files.
        remedy: for the message about a folder with another run.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        free: Collection[str] = (),
        config_name: str = "run.json",
        result_name: str = "result.json",
        remedy: str = "give those, or name another --out",
    ):
        self.folder, self.free, self.remedy = folder, frozenset(free), remedy
        self.config: dict[str, Any] = json.loads(json.dumps(config))  # as it will be read
        self.config_path, self.result_path = folder / config_name, folder / result_name

    def state(self) -> State:
        """Return whether the folder has nothing yet, part of this run, or all of it.

        Raises:
            ExistsError: it has another run, or files of no run.
        """
        if not self.config_path.exists():
            existing = self.folder.iterdir() if self.folder.is_dir() else ()
            if any(not path.name.startswith(".") for path in existing):
                raise ExistsError(f"{self.folder} holds other files: name another --out")
            return "new"
        if field := self.difference():
            what = f"a run with other settings ({field})"
            raise ExistsError(f"{self.folder} holds {what}: {self.remedy}")
        return "finished" if self.result_path.exists() else "unfinished"

    def difference(self) -> str:
        """The first field in which the folder's run differs, with both values; "" if none does."""
        return _first_difference(read_json(self.config_path), FORMAT | self.config, self.free)

    def begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.result_path.unlink(missing_ok=True)
        write_json(self.config_path, FORMAT | self.config)

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.result_path, result)

    def result(self) -> dict[str, Any]:
        """Return the result that `finish` wrote; empty if the run is unfinished."""
        return read_json(self.result_path) if self.result_path.exists() else {}


@contextmanager
def keeping(summary: Callable[[], str]) -> Iterator[None]:
    """Context in which Ctrl-C prints what is kept for the same call: `summary`, "" for nothing."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if about := summary():
            raise Interrupted(about) from stop
        raise


@contextmanager
def defer_signals(*stops: signal.Signals) -> Iterator[Event]:
    """Context in which Ctrl-C and `kill`, or the given signals, only set the event: in the middle
    of a step they would leave no usable state. A second signal stops at once.
    """
    interrupted, stops = Event(), stops or (signal.SIGINT, signal.SIGTERM)
    if current_thread() is not main_thread():
        yield interrupted
        return
    before = {stop: signal.getsignal(stop) for stop in stops}

    def restore() -> None:
        for stop, handler in before.items():
            signal.signal(stop, handler)

    def note(*_: object) -> None:
        interrupted.set()
        restore()

    for stop in stops:
        signal.signal(stop, note)
    try:
        yield interrupted
    finally:
        restore()


def _first_difference(there: Any, here: Any, free: Collection[str], above: str = "") -> str:
    """The first field, of two configs, that is not free and differs, with both values."""
    for field in {**here, **there}:
        a, b, name = there.get(field), here.get(field), f"{above}{field}"
        if field in free or a == b:
            continue
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return f"{name.removeprefix('settings.')} is {a!r} there, {b!r} now"
        if inner := _first_difference(a, b, free, f"{name}."):
            return inner
    return ""
