"""Code of the user's own, by the name that it is imported by."""

import importlib
import sys
from pathlib import Path
from typing import Any

from kvalign.foundation.errors import UserError


def imported(name: str) -> Any:
    """What `MODULE:NAME` stands for; modules are those that are installed and those of the folder
    where the command runs, as with `python -m`.

    Raises:
        UserError: there is none, or it cannot be called.
    """
    module, _, member = name.partition(":")
    if not module or not member:
        raise UserError(f"--cache takes MODULE:NAME, got {name!r:.80}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
        for part in member.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--cache {name}: {error}") from error
    if not callable(found):
        raise UserError(f"--cache {name} must be callable with a model, got {type(found).__name__}")
    return found
