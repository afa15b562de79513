"""What a command names at its end, on stderr: the one to go on with."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from kvalign.settings import DEFAULT_MODEL


def say_next(*words: str | Path) -> None:
    """Name a command, by the words after `kvalign`."""
    print("next:", shlex.join(["kvalign", *map(str, words)]), file=sys.stderr)


def of_model(model: str) -> Iterable[str]:
    """The flag that names a model, where it is not the default."""
    return [] if model == DEFAULT_MODEL else ["--model", model]
