"""`kvalign eval NAME`: one evaluation; its tables, or the document that it ends in."""

import json
from typing import Any

from kvalign.eval.evaluation import Evaluation


class EvaluationCommand:
    """An evaluation as the catalogue takes a command's module."""

    def __init__(self, evaluation: Evaluation):
        self.evaluation = evaluation
        self.SETTINGS = evaluation.settings

    def run(self, settings: Any, as_json: bool) -> None:
        document = self.evaluation.run(settings)
        if as_json:
            print(json.dumps(document))
            return
        from kvalign.eval.terminal import print_tables

        print_tables(self.evaluation.tables(document))
