"""`kvalign pretrain`: train a small reference language model from scratch."""

from kvalign.training.settings import PretrainSettings

SETTINGS = PretrainSettings


def run(settings: PretrainSettings, as_json: bool) -> None:
    import json

    from kvalign.app.cli.next_steps import say_next, say_written
    from kvalign.training import pretrain

    print(json.dumps(pretrain(settings)))  # what there is to say are figures, with --json or not
    if as_json:
        return
    say_written(settings.out)
    if settings.is_recall:
        say_next("train", "--aligner-kind", "table", "--model", settings.out, "--corpus", "recall")
    elif settings.arch == "gpt2":
        say_next("train", "--aligner-kind", "table", "--model", settings.out)
    else:
        say_next("generate", "--method", "streaming-llm", "--model", settings.out)
