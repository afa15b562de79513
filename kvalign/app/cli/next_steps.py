"""Last lines of a command, on stderr: which command comes next."""

import os
import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from kvalign.foundation.errors import Interrupted, escape_controls
from kvalign.foundation.runs import PART_OF_RUN
from kvalign.foundation.settings import DEFAULT_MODEL

_LONG = ("train", "eval", "compile")  # of the commands that come next, those that take minutes


def say_next(*words: str | Path, why: str = "") -> None:
    """Name the next command, the words after `kvalign`; say if it takes minutes, and its use."""
    takes = " (takes minutes)" if words[0] in _LONG else ""
    comment = f"  # {why}" if why else ""
    _say(f"next{takes}: {shlex.join(['kvalign', *map(str, words)])}{comment}")


def say_generate(base_model: str, aligner: str | Path, *more: str) -> None:
    """Name the command that streams with an aligner, with more flags."""
    say_next("generate", "--method", "kvalign", *of_model(base_model), "--aligner", aligner, *more)


def say_written(*paths: Path | None) -> None:
    """Name the files that were written besides the output."""
    for path in filter(None, paths):
        _say(f"wrote {path}")


def say_stopped(
    name: str, stop: KeyboardInterrupt, args: Sequence[str], flags: Collection[str]
) -> None:
    """Print what Ctrl-C left of a command with these flags, and how to continue."""
    ending = ""
    if isinstance(stop, Interrupted):
        ending = f"; {stop}; to go on: {stop.to_go_on or shlex.join(['kvalign', *args])}"
    elif "--keep" in flags:
        ending = "; nothing was kept (--keep FOLDER keeps finished parts)"
    elif "--out" in flags:
        ending = "; nothing was kept; give the same command to start again"
    if sys.stderr.isatty() and PART_OF_RUN not in os.environ:
        print(file=sys.stderr)  # the terminal has shown ^C
    _say(f"kvalign {name}".rstrip() + f": interrupted{ending}")


def _say(line: str) -> None:
    if PART_OF_RUN not in os.environ:
        print(escape_controls(line), file=sys.stderr)


def of_model(model: str) -> Iterable[str]:
    return [] if model == DEFAULT_MODEL else ["--model", model]
