"""The example in the help of each command runs; smaller, in one folder, after those that write what
it reads.
"""

import json
import shlex
import shutil

import pytest
import torch
from helpers import smaller as less
from helpers.published_files import random_network
from helpers.uncompiled_step import not_compiled

from kvalign import checkpoints
from kvalign.aligners.kinds import KINDS
from kvalign.app.cli.catalogue import COMMANDS

# What each reads that another writes.
NEEDS = {"train": ["gen-data"], "tune": ["gen-data"], "report": ["eval run"]}
OF_NETWORK = [*KINDS].index("network")  # the example of train that judge reads
SERVED = ["serve"]  # until Ctrl-C: test_serve.py serves its own
# Less than pages need: one cache size to judge by, one of the methods that a suite has.
LEAST = less.SMALLER | {(x, "chunk_len"): 32 for x in ("train", "gen-data")}
LEAST |= {("gen-data", "num_tokens"): 1024, ("verify", "invariants"): ("dense",)}
LEAST |= {(f"eval {x}", "methods"): ("kvalign",) for x in ("readability", "streameval")}
pytestmark = pytest.mark.slow
EXAMPLES = [
    pytest.param(command, number, id=shlex.join(words)[:60])
    for command in COMMANDS
    if command not in SERVED
    for number, words in enumerate(less.examples(command))
]


@pytest.fixture(scope="module")
def run_example(tmp_path_factory):
    """Runs an example of a command once, what it needs before it; returns what it prints."""
    outputs = {}

    def run(command, number=0):
        for needed in NEEDS.get(command, []):
            run(needed)
        if command == "judge":
            run("train", OF_NETWORK)
            config = json.loads((folder / "my-network" / "config.json").read_text())
            for part in config["training"].values():  # which was too small to be used
                part["used"] = True
            (folder / "my-network" / "config.json").write_text(json.dumps(config))
        if (command, number) not in outputs:
            with pytest.MonkeyPatch.context() as only_here:
                if command == "compile":  # test_stored_step.py has compilers work
                    not_compiled(only_here)
                words = less.smaller(less.examples(command)[number], LEAST)
                outputs[command, number] = less.output_of(words)
        return outputs[command, number]

    folder = tmp_path_factory.mktemp("examples")
    write_published(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (less.INSIDE | less.UNDRAWN).items():
            patch.setattr(name, value)
        patch.setattr("kvalign.training.judge.NUM_ROWS", 2)
        patch.setattr("kvalign.app.commands.eval_run.Cell.output", less.run_cell)
        patch.setattr("kvalign.training.sweep.run_trials", less.one_trial)
        patch.setattr("kvalign.steppers.stored.cache_dir", lambda: folder / "cache")
        patch.chdir(folder)
        yield run


def write_published(folder):
    """What the example of import-published names: two networks, and the model they are for."""
    shutil.copytree(checkpoints.model_path("gpt2-mini"), folder / "distilbert" / "distilgpt2")
    for name, hidden in (("keys", (256, 64)), ("values", (64, 128))):
        network = random_network(*hidden, num_layers=6, num_heads=4, head_dim=64, num_positions=256)
        torch.save(network, folder / f"{name}_network_distilgpt2.pth")


@pytest.mark.parametrize(("command", "number"), EXAMPLES)
def test_an_example_runs(command, number, run_example):
    assert run_example(command, number)


def test_an_aligner_that_was_trained_streams(run_example):
    """Its folder is named as `kvalign train` was told."""
    (words,) = (words for words in less.examples("train") if "table" in words)
    run_example("train", less.examples("train").index(words))
    aligner = words[words.index("--out") + 1]
    words = ["--prompt", "It", "--cache-size", "20", "--max-new-tokens", "30"]
    less.output_of(["generate", "--aligner", aligner, *words])
