"""What a command says at its end, on stderr: the one to go on with."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvalign.errors import Interrupted
from kvalign.settings import DEFAULT_MODEL

PART_OF_RUN = "KVALIGN_PART_OF_RUN"  # in the environment of a suite's cell: the run speaks for it


def say_next(*words: str | Path) -> None:
    """Name a command, by the words after `kvalign`."""
    print("next:", shlex.join(["kvalign", *map(str, words)]), file=sys.stderr)


def say_stopped(name: str, stop: KeyboardInterrupt, args: Sequence[str]) -> None:
    """Say what Ctrl-C left of a command, and how to go on with that."""
    if PART_OF_RUN in os.environ:
        return
    kept = "nothing was kept"
    if isinstance(stop, Interrupted):
        kept = f"{stop}; to go on: {shlex.join(['kvalign', *args])}"
    below = "\n" if sys.stderr.isatty() else ""  # the terminal has shown ^C
    print(f"{below}kvalign {name}".rstrip() + f": interrupted; {kept}", file=sys.stderr)


def of_model(model: str) -> Iterable[str]:
    """The flag that names a model, where it is not the default."""
    return [] if model == DEFAULT_MODEL else ["--model", model]
