"""`kvalign eval NAME`: one evaluation; its tables, or the document that it ends in."""

import json
from typing import Any

from kvalign.app.cli.next_steps import say_written
from kvalign.eval.protocol.evaluation import Evaluation

_WRITTEN = ("plot", "keep", "out")  # settings that name a file or a folder


class EvaluationCommand:
    """An evaluation as the catalogue takes a command's module."""

    def __init__(self, evaluation: Evaluation):
        self.evaluation = evaluation
        self.SETTINGS = evaluation.settings

    def run(self, settings: Any, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.evaluation.run(settings)))
        else:
            settings = self.evaluation.prepared(settings)
            self.evaluation.show(self.evaluation.run(settings), settings)
        say_written(*(getattr(settings, name, None) for name in _WRITTEN))
