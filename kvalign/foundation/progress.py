"""Progress of long work, on stderr: one bar over all of it, with the current phase.

`shown_as` opens the bar. Code within it reports how much there is to do (`expect`), what is done
(`advance`) and the current phase (`phase`), whether or not anyone sees it. In a terminal or a
notebook the bar is tqdm's. In a file, a pipe or CI it is a line every few seconds, later less
often. After a while without progress no time left is shown. Work that ends within a second shows
nothing; work without a count shows its phase and the time. `TQDM_DISABLE=1` turns everything off.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from tqdm.asyncio import tqdm_asyncio
from tqdm.auto import tqdm

DELAY_S = 1.0
LINE_S = 5.0  # from one line to the next, at least,
LINE_SHARE = 0.01  # and this share of the time so far
_UNCOUNTED = "{desc} [{elapsed}]"
_LINE = (
    "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt}{unit}{postfix}, {rate_noinv_fmt}, "
    "{elapsed} so far, {remaining} left"
)
_LINE_AT_REST = (
    "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt}{unit}{postfix}, {elapsed} so far"
)
_BAR_AT_REST = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_LAST_LINE = "{desc}: {n_fmt} of {total_fmt}{unit} in {elapsed}"
_in_notebook = tqdm is not tqdm_asyncio


class Bar(tqdm):
    """Bar over one piece of work; it counts nothing until `expect` says how much there is.

    Only a thread of its own draws it, once a second or when the next line is due. So it shows life
    without progress, and does not disturb timings. In a notebook the bar draws itself.
    """

    def __init__(self, name: str):
        self.name, self.began, self.drawn_at = name, time.monotonic(), 0.0
        self._ended = Event()
        more: dict[str, Any] = {"desc": f"{name}: starting", "dynamic_ncols": True}
        if not _in_notebook:
            more |= {"delay": DELAY_S, "bar_format": _UNCOUNTED}
        super().__init__(miniters=1, smoothing=0.1, **more)
        self._time = time.monotonic  # tqdm's own would jump with the machine's clock
        self.start_t = self.last_print_t = self._time()
        self.is_drawn = not (self.disable or _in_notebook)
        has_width = self.is_drawn and (self.ncols is None or self.ncols > 0)
        self.is_line = self.is_drawn and not (has_width and sys.stderr.isatty())
        if self.is_line:
            self.sp = lambda line: print(line, file=sys.stderr, flush=True)
        if self.is_drawn:
            Thread(target=self._draw, daemon=True).start()

    def expect(self, amount: int, units: str) -> None:
        """Add to the work to do, in one unit."""
        if self.disable:
            return
        if self.n == self.initial:
            self.last_print_t = self._time()  # the speed is that of what counts
        self.total, self.unit = (self.total or 0) + amount, f" {units}"
        self.unit_scale = self.total >= 10_000
        if not self.is_line:
            self.bar_format = None
        if _in_notebook and not self.n:
            self.reset(self.total)  # its widget has a length of its own

    def update(self, amount: float | None = 1) -> bool | None:
        """Add to the work done."""
        if not self.is_drawn:
            return super().update(amount)
        self.n += amount or 0
        return None

    def skip(self, amount: int) -> None:
        """Add work that was done before and does not count for the speed."""
        if not self.disable:
            self.initial += amount
            self.last_print_n += amount
        self.update(amount)

    def phase(self, doing: str) -> None:
        """Name the current phase."""
        self.set_description_str(f"{self.name}: {doing}", refresh=False)

    def note(self, **figures: str) -> None:
        """Show figures behind the count."""
        self.set_postfix(figures, refresh=False)

    def close(self) -> None:
        """Close the bar and leave it visible, unless it counted nothing."""
        self._ended.set()
        if self.n == self.total:
            self.desc = self.name
        if self.is_drawn and not self.disable:
            with self.get_lock():
                if self.is_line:
                    if self.drawn_at:
                        self.bar_format = _LAST_LINE if self.total else _UNCOUNTED
                        self.display()
                    self.sp = None  # nothing to clear
                elif self.drawn_at:
                    self.leave = bool(self.total)
                    self.last_print_t = self._time()
        super().close()

    def __del__(self) -> None:
        """Leave it: to close it waits for a lock, which a thread may have that has ended with
        Python.
        """

    def _draw(self) -> None:
        counted, advanced_at = self.n, self.began
        while not self._ended.wait(DELAY_S):
            now = time.monotonic()
            if self.n != counted:
                counted, advanced_at = self.n, now
            is_at_rest = now - advanced_at >= LINE_S
            wait = max(LINE_S, LINE_SHARE * (now - self.began)) if self.is_line else 0
            if now - (self.drawn_at or self.began) >= wait:
                with self.get_lock():
                    if not self._ended.is_set():
                        self.drawn_at = now
                        if self.is_line and self.n > self.initial:
                            self.bar_format = _LINE_AT_REST if is_at_rest else _LINE
                        elif self.total and not self.is_line:
                            self.bar_format = _BAR_AT_REST if is_at_rest else None
                        if not super().update(0):  # which draws what has advanced
                            self.refresh(nolock=True)


@contextmanager
def _line_of_its_own() -> Iterator[None]:
    """Context in which stderr is at the beginning of a line, also while a bar is drawn."""
    if _bar is None or _bar.is_line or not _bar.drawn_at:
        yield
        return
    with _bar.get_lock():
        _bar.clear(nolock=True)
        yield


class LogHandler(logging.StreamHandler):
    """Handler that logs to stderr, on separate lines while a bar is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        with _line_of_its_own():
            super().emit(record)


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
        if _bar.total:  # what was not needed of it is done, too
            _bar.update(_bar.total - _bar.n)
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
        if figures:
            _bar.note(**figures)
        _bar.update(amount)


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
    with _line_of_its_own():
        print(line, file=sys.stderr, flush=True)
