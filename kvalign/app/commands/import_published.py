"""`kvalign import-published`: the networks that the paper's authors publish, as an aligner."""

from kvalign.training.settings import ImportPublishedSettings

SETTINGS = ImportPublishedSettings


def run(settings: ImportPublishedSettings, as_json: bool) -> None:
    import json

    from kvalign.app.cli.next_steps import of_model, say_next
    from kvalign.training import import_published

    config = import_published(settings)
    if as_json:
        print(json.dumps({"out": str(settings.out), "sizes": config.sizes}))
        return
    print(f"{settings.out}: the authors' networks for {config.base_model}")
    of_base = of_model(config.base_model)
    say_next("generate", "--method", "kvalign", *of_base, "--aligner", settings.out)
