"""What `kvalign train` says at the end: figures of equal sinks, verdicts against `discard-half`,
and a next command whose method was measured as better.
"""

import re

import pytest
from helpers.methods import tables

from kvalign.app.commands.train import say_use_of, verdict_lines

BOTH = ["key", "value"]


def judged(parts, num_sinks, tried_sinks, tried, without, ratios=()):
    about = dict(cache_sizes=[32], num_labels=500, discard_half=1.0, parts=parts)
    of_tried = {"parts": BOTH, "num_sinks": tried_sinks, "val_nll": tried}
    about |= dict(without={"num_sinks": tried_sinks, "val_nll": without}, tried=of_tried)
    verdicts = [
        {"cache_size": size, "ratio": x, "low": x - 0.01, "high": x + 0.01} for size, x in ratios
    ]
    return about | {"num_sinks": num_sinks, "against_discard_half": verdicts}


@pytest.mark.parametrize(
    ("found", "figures", "words"),
    [
        (judged(BOTH, 0, 0, 3.0, 4.0), ["54.6", "2.718", "20.09"], "used: 20.09 with keys and v"),
        (
            judged([], 4, 4, 3.2, 3.0),
            ["20.09", "2.718", "24.53"],
            "is no better; the saved aligner",
        ),
        (judged([], 4, 4, 2.999, 3), ["20.09", "2.718", "20.07"], "is not distinguishable from"),
        # A network is compared with the usual sinks, where the best may be of others.
        (judged([], 4, 0, 4.2, 4), ["54.6", "2.718", "66.69"], "with discard-half of 4 sinks"),
    ],
)
def test_the_figures_are_of_equal_sinks(found, figures, words):
    said = "\n".join(verdict_lines(found))
    assert re.findall(r"\d+\.\d+", said) == figures and words in said


@pytest.mark.parametrize(
    ("ratios", "said", "next_words"),
    [
        ([(32, 0.98), (128, 0.99)], "", "--method kvalign --model mine --aligner"),
        ([(32, 0.98), (128, 1.02)], "takes discard-half at C = 128, which", "--cache-size 32"),
        (
            [(32, 1.01), (128, 1.02)],
            "takes discard-half: the aligner is better at no size",
            "--method discard-half --model",
        ),
        # Better at no size beyond the interval: what is below 1 is chance.
        (
            [(32, 0.995), (128, 1.02)],
            "takes discard-half: the aligner is better at no size",
            "--method discard-half --model",
        ),
    ],
)
def test_the_next_command_is_the_better_method(models, tmp_path, capsys, ratios, said, next_words):
    found = judged(BOTH, 0, 0, 3.0, 4.0, ratios)
    first = ratios[0][1]
    assert f"{first:.3f} ({first - 0.01:.3f} to" in "".join(verdict_lines(found))
    aligner = tables(models["gpt2"])
    training = {kv: {"used": True, "judged": found} for kv in BOTH}
    about = {"training": training, "base_model": "mine"}
    aligner.config = aligner.config.model_copy(update=about)
    (tmp_path / "README.md").touch()
    aligner.save_pretrained(tmp_path)
    say_use_of(tmp_path)
    told = capsys.readouterr().err
    assert next_words in told and said in told and ("auto takes" in told) == bool(said)
