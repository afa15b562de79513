"""`kvalign judge`: a copy of an aligner with the networks that help streams."""

from typing import Any

from kvalign.app.commands.train import say_use_of, verdict_lines
from kvalign.training.settings import JudgeSettings


def judge(settings: JudgeSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.training import judge_aligner

    judged = judge_aligner(settings)
    if not as_json:
        print(*verdict_lines(judged), f"aligner: {settings.out}", sep="\n")
        say_use_of(settings.out)
    return judged
