"""`kvalign import-published`: make an aligner from the networks of the paper's authors."""

from typing import Any

from kvalign.app.cli.next_steps import say_generate
from kvalign.training.settings import ImportPublishedSettings


def import_published(settings: ImportPublishedSettings, as_json: bool) -> dict[str, Any]:
    from kvalign import training

    config = training.import_published(settings)
    if not as_json:
        print(f"{settings.out}: the authors' networks for {config.base_model}")
        say_generate(config.base_model, settings.out)
    return {"out": str(settings.out), "sizes": config.sizes}
