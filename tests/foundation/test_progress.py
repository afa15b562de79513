"""The one bar: in a terminal, in a file, and not at all."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest

from kvalign.foundation import progress


@pytest.fixture
def hurried(monkeypatch):
    """Seconds are tenths."""
    monkeypatch.setattr(progress, "DELAY_S", 0.1)
    monkeypatch.setattr(progress, "LINE_S", 0.5)


def job(num_steps, pause_s=0.0):
    with progress.shown_as("job"):
        progress.phase("reading")
        time.sleep(pause_s)
        progress.expect(10 * num_steps, "tokens")
        progress.phase("counting")
        for step in range(num_steps):
            progress.advance(9, loss=f"{step}")
            if step in (num_steps // 2, num_steps // 2 + 1):
                time.sleep(pause_s)


def drawn_in_terminal(monkeypatch, work):
    """What `work` writes to stderr where that is a terminal, cut at returns."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.set_blocking(reader, False)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as stderr:
        patch.setattr("sys.stderr", stderr)
        work()
        stderr.flush()
        written = b""
        with suppress(BlockingIOError):
            while True:
                written += os.read(reader, 4096)
    os.close(reader)
    return written.decode().replace("\r\n", "\n").split("\r") if written else []


def test_a_file_gets_a_line_when_it_is_time(hurried, capfd):
    began = time.monotonic()
    job(1500, pause_s=0.6)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"job: reading \[0:00:\d\d\]", lines[0])
    assert 3 <= len(lines) <= (time.monotonic() - began) / 0.5 + 1  # of 1500 steps
    counted = r"job: counting: \d+%, \d+ of 15000 tokens, loss=\d+, .* so far(, .* left)?"
    assert re.fullmatch(counted, lines[1])
    assert lines[-1].startswith("job: 15000 of 15000 tokens in 0:00:")  # all that was needed


def test_a_terminal_gets_a_bar_that_ends_full(hurried, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    drawn = drawn_in_terminal(monkeypatch, lambda: job(40, pause_s=0.6))
    assert any("job: reading [" in one for one in drawn)
    assert any("job: counting: " in one and " of 400 tokens" in one for one in drawn)
    assert any(" left" in one for one in drawn), "on a second line, where the first is too short"
    assert "job: 400 of 400 tokens in 0:00:" in "".join(drawn[-2:])


def test_it_can_be_turned_off():
    code = (
        "import time; from kvalign.foundation import progress as p; p.DELAY_S = p.LINE_S = 0.05\n"
        "with p.shown_as('job'):\n p.expect(9, 'rows'); p.skip(3); p.phase('x'); time.sleep(1)"
    )
    for switch in ("", "1"):
        environment = {**os.environ, "TQDM_DISABLE": switch}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert done.returncode == 0 and bool(done.stderr) == (switch == "")


def test_more_work_than_was_expected_at_first_takes_time(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    bar = progress.Bar("job")
    bar.expect(2, "rows")
    for _ in range(2):
        bar.update(1)
        time.sleep(0.01)
    bar.expect(10**6, "rows")
    assert re.search(r": 0%, 2 of 1000002 rows, 0:00:00 so far, \d:[^,]+ left$", bar.line)
    assert not bar.line.endswith(", 0:00:00 left")


def test_what_is_short_says_nothing(monkeypatch, capfd):
    monkeypatch.setattr(progress, "DELAY_S", 60)  # short on a busy machine, too
    assert drawn_in_terminal(monkeypatch, lambda: job(100)) == []
    job(100)
    assert capfd.readouterr().err == ""
