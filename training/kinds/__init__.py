"""Training of each kind of aligner: one module for each kind, of the same name, with

- `SETTINGS`, the class of its settings, built from those in `kvalign.training.settings`;
- `train(settings)`, which trains and saves an aligner. If it loads a model it also takes `loaded`.

A kind that is trained on text calls `kvalign.training.text_run.train_on_text`, which does
everything except the training itself. A new kind is one such module, with its `Aligner`, and a line
in `kvalign.aligners.kinds`.
"""

import importlib
from types import ModuleType

from kvalign.aligners.kinds import KINDS
from kvalign.foundation.errors import UserError
from kvalign.foundation.registry import unknown


def trainer_of(kind: str) -> ModuleType:
    """Module that trains aligners of a kind; UserError for an unknown one."""
    if kind not in KINDS:
        raise UserError(unknown(KINDS.what, kind, KINDS))
    return importlib.import_module(f"{__name__}.{kind.replace('-', '_')}")
