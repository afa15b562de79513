"""`kvalign pretrain`: train a small reference language model."""

import json
from typing import Any

from kvalign.app.cli.next_steps import say_next, say_written
from kvalign.training.settings import PretrainSettings


def pretrain(settings: PretrainSettings, as_json: bool) -> dict[str, Any]:
    from kvalign import training

    figures = training.pretrain(settings)
    if not as_json:
        print(json.dumps(figures))  # all that there is to say
        say_written(settings.out)
        if settings.arch == "gpt2" or settings.is_recall:
            corpus = ["--corpus", "recall"] if settings.is_recall else []
            say_next("train", "table", "--model", settings.out, *corpus)
        else:
            say_next("generate", "--method", "streaming-llm", "--model", settings.out)
    return figures
