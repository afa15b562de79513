"""`kvalign eval import-losses`: analyse losses that the paper's authors measured."""

from kvalign.app.cli.next_steps import say_written
from kvalign.eval.evaluations.perplexity.imported import ImportLossesSettings
from kvalign.eval.protocol.evaluation import Document


def run(settings: ImportLossesSettings, as_json: bool) -> Document:
    from kvalign.eval.evaluations.perplexity import EVALUATION
    from kvalign.eval.evaluations.perplexity.imported import import_losses

    document = import_losses(settings)
    if not as_json:
        EVALUATION.show(document, settings)
    say_written(settings.out, settings.csv)
    return document
