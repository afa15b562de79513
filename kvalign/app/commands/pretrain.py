"""`kvalign pretrain`: train a small reference language model from scratch."""

from kvalign.training.settings import PretrainSettings

HAS_JSON = False
SETTINGS = PretrainSettings


def run(settings: PretrainSettings, as_json: bool) -> None:
    import json

    from kvalign.training import pretrain

    print(json.dumps(pretrain(settings)))
