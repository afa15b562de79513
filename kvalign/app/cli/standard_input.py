"""Text from standard input, if it is a pipe or a file; it never waits forever."""

import os
import select
import stat
import sys
from pathlib import Path

from kvalign.foundation.errors import UserError
from kvalign.foundation.files import text_of

PIPE_S = 5.0
QUIET_S, WAIT_S = 1.0, 10.0  # the first part of the wait is not spoken of


def piped_text() -> str:
    """Return the piped text without its last line break; "" without a pipe.

    After `WAIT_S` seconds it gives up on an open and empty pipe, which some CI systems leave.
    """
    try:
        file = sys.stdin.fileno()
        mode = os.fstat(file).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file of the system's
        return ""
    is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    has_text = stat.S_ISREG(mode) or (is_pipe and _has_come(file))
    return whole_text().removesuffix("\n") if has_text else ""


def whole_text() -> str:
    """Standard input up to its end, without a time limit; UserError if it is not UTF-8 text."""
    return text_of(sys.stdin.buffer.read() if sys.stdin else b"", "standard input")


def text_of_pipe(path: Path) -> str:
    """The whole text of a named pipe, such as a shell's <(...); UserError without text."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        if not select.select([pipe], [], [], PIPE_S)[0]:
            raise UserError(f"{path} is a pipe without input for {PIPE_S:g} s")
        os.set_blocking(pipe.fileno(), True)
        return text_of(pipe.read(), path)


def _has_come(file: int) -> bool:
    """Return whether there is input, or its end."""
    try:
        if select.select([file], [], [], QUIET_S)[0]:
            return True
        about = "for a prompt on standard input; --prompt gives one, --prompt-file - waits longer"
        print(f"waiting {WAIT_S:g} s {about}", file=sys.stderr)
        return bool(select.select([file], [], [], WAIT_S - QUIET_S)[0])
    except OSError:  # Windows asks sockets alone
        return True
