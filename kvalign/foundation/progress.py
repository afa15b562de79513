"""Progress of long work, on stderr: one bar of rich over all of it, with the current phase.

`shown_as` opens the bar. Code within it reports how much there is to do (`expect`), what is done
(`advance`) and the current phase (`phase`), whether or not anyone sees it. In a terminal it is a
bar; in a file, a pipe, a notebook or CI it is a line every few seconds, later less often. Work that
ends within a second shows nothing; work without a count shows its phase and the time.
`TQDM_DISABLE=1` turns everything off.
"""

import functools
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

log = logging.getLogger(__name__)

DELAY_S = 1.0
LINE_S = 5.0  # from one line to the next, at least,
LINE_SHARE = 0.01  # and this share of the time so far


class Bar:
    """Bar over one piece of work; it counts nothing until `expect` says how much there is.

    Only threads of its own draw it, once a second or when the next line is due. So it shows life
    without progress, and does not disturb timings.
    """

    def __init__(self, name: str):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self.name, self.units, self._doing, self._figures = name, "", "starting", ""
        self._bar = Progress(
            BarColumn(20),
            TextColumn("{task.fields[bar].line}", markup=False, table_column=Column()),  # wraps
            console=Console(stderr=True),
            refresh_per_second=1 / DELAY_S,
            redirect_stdout=False,  # it may be a file
        )
        self._bar.add_task(name, total=None, bar=self)
        (self._task,) = self._bar.tasks
        self._ended, self._thread = Event(), Thread(target=self._draw, daemon=True)
        if os.environ.get("TQDM_DISABLE", "") in ("", "0"):
            self._thread.start()

    @property
    def n(self) -> int:
        return int(self._task.completed)

    def expect(self, amount: int, units: str) -> None:
        self._task.total, self.units = (self._task.total or 0) + amount, units
        self._task.finished_time = None  # it may have been reached

    def update(self, amount: int = 1, **figures: str) -> None:
        """Add to the work done; figures follow the count."""
        if figures:
            self._figures = "".join(f", {name}={value}" for name, value in figures.items())
        self._bar.advance(self._task.id, amount)

    def skip(self, amount: int) -> None:
        self._task.completed += amount

    def phase(self, doing: str) -> None:
        self._doing = doing

    def close(self, is_done: bool = False) -> None:
        """Close the bar and leave it visible, unless it counted nothing; what was not needed of
        work that is done is done, too.
        """
        if is_done and self._task.total is not None:
            self._task.completed = self._task.total
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def line(self) -> str:
        task, doing = self._task, f"{self.name}: {self._doing}"
        so_far = _clock(task.elapsed or 0)
        if not task.total:
            return f"{doing} [{so_far}]"
        count = f"{self.n} of {task.total} {self.units}"
        if self._ended.is_set() and self.n == task.total:
            return f"{self.name}: {count} in {so_far}"
        left = "" if task.time_remaining is None else f", {_clock(task.time_remaining)} left"
        return f"{doing}: {task.percentage:.0f}%, {count}{self._figures}, {so_far} so far{left}"

    def _draw(self) -> None:
        if self._bar.console.is_terminal:
            if not self._ended.wait(DELAY_S):
                with self._bar:
                    self._ended.wait()
                    self._bar.live.transient = not self._task.total
            return
        is_shown, began = False, time.monotonic()
        while not self._ended.wait(max(LINE_S, LINE_SHARE * (time.monotonic() - began))):
            is_shown = True
            say(self.line)
        if is_shown:
            say(self.line)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class LogHandler(logging.Handler):
    """Handler that logs to stderr, on separate lines while a bar is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


_bar: Bar | None = None


@contextmanager
def shown_as(name: str) -> Iterator[Bar]:
    """Bar over the work within; if one is open already, a phase of it. Also a decorator."""
    global _bar
    if _bar is not None:
        _bar.phase(name)
        yield _bar
        return
    _bar = Bar(name)
    is_done = False
    try:
        yield _bar
        is_done = True
    finally:
        _bar.close(is_done)
        _bar = None


def expect(amount: int, units: str) -> None:
    if _bar is not None:
        _bar.expect(amount, units)


def advance(amount: int, **figures: str) -> None:
    """Add to the work done; figures follow the count."""
    if _bar is not None:
        _bar.update(amount, **figures)


def skip(amount: int) -> None:
    if _bar is not None:
        _bar.skip(amount)


def phase(doing: str) -> None:
    if _bar is not None:
        _bar.phase(doing)


def say(line: str) -> None:
    """Write a line to stderr, above the bar."""
    print(line, file=sys.stderr, flush=True)


@functools.cache
def warn_once(message: str) -> None:
    log.warning(message)
