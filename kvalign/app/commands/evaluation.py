"""`kvalign eval NAME`: run one evaluation; print its tables or its document."""

from dataclasses import dataclass
from typing import Any

from kvalign.app.cli.next_steps import say_written
from kvalign.eval.protocol import Document, Evaluation
from kvalign.eval.protocol.settings import ResultSettings

_WRITTEN = ("plot", "keep", "out", "csv", "page")  # settings that name a file or a folder


@dataclass
class EvaluationCommand:
    """Adapter: an evaluation as a command's function."""

    evaluation: Evaluation

    @property
    def settings(self) -> type[ResultSettings]:
        return self.evaluation.settings

    def __call__(self, settings: Any, as_json: bool) -> Document:
        settings = settings if as_json else self.evaluation.prepared(settings)
        document = self.evaluation.run(settings)
        if not as_json:
            self.evaluation.show(document, settings)
        say_written(*(getattr(settings, name, None) for name in _WRITTEN))
        return document
