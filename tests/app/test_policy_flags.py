"""`--policy`, `--num-recent` and `--positions` on the command line: what they do, and what is
refused in one line before there is any work.
"""

import json

import pytest

from kvalign.app.cli.main import main

GENERATE = "generate --model gpt2-mini --prompt the --cache-size 32 --max-new-tokens 40 --seed 0"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["oldest", "h2o"])
def test_each_policy_streams_and_says_what_it_took(policy, capfd):
    assert main([*GENERATE.split(), "--policy", policy, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    settings = document["settings"]
    assert (settings["policy"], settings["positions"]) == (policy, "compact")
    assert settings["num_recent"] == (0 if policy == "oldest" else 8)


@pytest.mark.slow
def test_the_end_of_kept_positions_is_said(capfd):
    keep = (
        "--method streaming-llm --policy key-norm --positions keep --max-new-tokens 600 --top-k 1"
    )
    assert main([*GENERATE.replace("gpt2-mini", "recall-gpt2").split(), *keep.split()]) == 0
    said = capfd.readouterr().err
    assert (
        "the stream ends here: the model has no more positions\n256 tokens with streaming" in said
    )
