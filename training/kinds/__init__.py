"""Training of each kind of aligner: one module a kind, named as the kind, with

- `SETTINGS`, the class of its settings, made of those in `kvalign.training.settings`;
- `train(settings)`, which trains and saves an aligner; those that load a model also take `loaded`.

A kind that is trained on text calls `kvalign.training.text_run.train_on_text`, which does all but
the training itself. A new kind is one such module, its `Aligner` in it, and a line in
`kvalign.aligners.kinds`.
"""

import importlib
from types import ModuleType

from kvalign.aligners.kinds import KINDS
from kvalign.foundation.errors import UserError
from kvalign.foundation.registry import unknown


def trainer_of(kind: str) -> ModuleType:
    """The module that trains aligners of a kind; UserError for an unknown one."""
    if kind not in KINDS:
        raise UserError(unknown(KINDS.what, kind, KINDS))
    return importlib.import_module(f"{__name__}.{kind.replace('-', '_')}")
