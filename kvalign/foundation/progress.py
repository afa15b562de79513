"""Progress of long work, on stderr: one bar over all of it, with the current phase.

`shown_as` opens the bar. Code within it reports how much there is to do (`expect`), what is done
(`advance`) and the current phase (`phase`), whether or not anyone sees it. In a terminal it is a
bar; in a file, a pipe, a notebook or CI it is a line every few seconds, later less often. After a
while without progress no time left is shown. Work that ends within a second shows nothing; work
without a count shows its phase and the time. `TQDM_DISABLE=1` turns everything off.
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
from typing import Any

log = logging.getLogger(__name__)

DELAY_S = 1.0
LINE_S = 5.0  # from one line to the next, at least,
LINE_SHARE = 0.01  # and this share of the time so far


class Bar:
    """Bar over one piece of work; it counts nothing until `expect` says how much there is.

    Only a thread of its own draws it, once a second or when the next line is due. So it shows life
    without progress, and does not disturb timings.
    """

    def __init__(self, name: str):
        self.name, self.units, self.total, self.n = name, "", 0, 0
        self._doing, self._figures, self._num_skipped = "starting", "", 0
        self._began = self._counts_since = self._advanced_at = time.monotonic()
        self._ended, self._thread = Event(), Thread(target=self._draw, daemon=True)
        if os.environ.get("TQDM_DISABLE", "") in ("", "0"):
            self._thread.start()

    def expect(self, amount: int, units: str) -> None:
        """Add to the work to do, in one unit."""
        if self.n == self._num_skipped:
            self._counts_since = time.monotonic()  # the speed is that of what counts
        self.total, self.units = self.total + amount, units

    def update(self, amount: int = 1, **figures: str) -> None:
        """Add to the work done; figures follow the count."""
        if figures:
            self._figures = "".join(f", {name}={value}" for name, value in figures.items())
        self.n += amount
        self._advanced_at = time.monotonic()

    def skip(self, amount: int) -> None:
        """Add work that was done before and does not count for the speed."""
        self._num_skipped += amount
        self.update(amount)

    def phase(self, doing: str) -> None:
        """Name the current phase."""
        self._doing = doing

    def close(self) -> None:
        """Close the bar and leave it visible, unless it counted nothing."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def line(self) -> str:
        """Line about what is done and what is left."""
        now = time.monotonic()
        so_far = _clock(now - self._began)
        if not self.total:
            return f"{self.name}: {self._doing} [{so_far}]"
        count = f"{self.n} of {self.total} {self.units}"
        if self._ended.is_set() and self.n == self.total:
            return f"{self.name}: {count} in {so_far}"
        line = f"{self.name}: {self._doing}: {self.n / self.total:.0%}, {count}{self._figures}"
        num = self.n - self._num_skipped
        if num <= 0 or now - self._advanced_at >= LINE_S:
            return f"{line}, {so_far} so far"
        speed = num / max(now - self._counts_since, 1e-9)
        left = _clock(max(0, self.total - self.n) / speed)
        per_second = f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"
        return f"{line}, {per_second}/s, {so_far} so far, {left} left"

    def _draw(self) -> None:
        from rich.console import Console

        console, is_shown = Console(stderr=True), False
        if console.is_terminal:
            if not self._ended.wait(DELAY_S):
                self._draw_bar(console)
            return
        while not self._ended.wait(max(LINE_S, LINE_SHARE * (time.monotonic() - self._began))):
            is_shown = True
            say(self.line())
        if is_shown:
            say(self.line())

    def _draw_bar(self, console: Any) -> None:
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        def row() -> Table:
            grid = Table.grid(padding=(0, 1))
            bar = [ProgressBar(self.total, self.n, width=20)] if self.total else []
            grid.add_row(*bar, self.line())
            return grid

        with Live(
            get_renderable=row,
            console=console,
            refresh_per_second=1 / DELAY_S,
            redirect_stdout=False,  # it may be a file
        ) as live:
            self._ended.wait()
            live.transient = not self.total


def _clock(seconds: float) -> str:
    """`0:01:30`."""
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
    try:
        yield _bar
        _bar.n = _bar.total  # what was not needed of it is done, too
    finally:
        _bar.close()
        _bar = None


def expect(amount: int, units: str) -> None:
    """Add to the work to do, as `Bar.expect`."""
    if _bar is not None:
        _bar.expect(amount, units)


def advance(amount: int, **figures: str) -> None:
    """Add to the work done; figures follow the count."""
    if _bar is not None:
        _bar.update(amount, **figures)


def skip(amount: int) -> None:
    """Add work that was done before, as `Bar.skip`."""
    if _bar is not None:
        _bar.skip(amount)


def phase(doing: str) -> None:
    """Name the current phase."""
    if _bar is not None:
        _bar.phase(doing)


def say(line: str) -> None:
    """Write a line to stderr, above the bar."""
    print(line, file=sys.stderr, flush=True)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, once."""
    log.warning(message)
