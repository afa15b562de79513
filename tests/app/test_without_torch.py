"""What needs no torch, which takes seconds to import: names, settings, help, what TAB offers,
lists of what ships, and the judgement of a text. One process of its own does one after the other.
"""

import subprocess
import sys

from kvalign import checkpoints
from kvalign.app.cli.catalogue import COMMANDS
from kvalign.data_gen import corpora
from kvalign.methods.registry import METHODS

HEAVY = ("torch", "transformers", "datasets", "pandas")
LISTS = ("list aligners", "list corpora")
SETTINGS = f"""
import sys

def check(*more):
    found = {{*{HEAVY}, *more}} & {{*sys.modules}}
    assert not found, found

import kvalign, kvalign.eval
from kvalign.eval.evaluations import EVALUATIONS
assert [evaluation.settings for evaluation in EVALUATIONS.values()] and kvalign.__version__
check("pydantic.main", "matplotlib", "rich")

import kvalign.training
from kvalign.aligners.kinds import KINDS
from kvalign.app.cli import completion
from kvalign.app.commands import train
from kvalign.data_gen.corpora import SPECS
from kvalign.data_gen.corpus import PROMPTS
from kvalign.data_gen.settings import RecordSettings
from kvalign.methods import METHODS
assert "kvalign" in METHODS and [*KINDS] and train.all_settings() and completion.parser()
assert kvalign.training.train_table.__doc__
check()
"""
DONE = f"""
from kvalign.app.cli.main import main

for words in {[*(f"{command} --help" for command in ["", *COMMANDS]), *LISTS]}:
    assert main(words.split()) == 0
check()
assert main(["eval", "readability", "--text", "good.txt"]) == 0
assert not {{"torch", "transformers"}} & {{*sys.modules}}
"""


def test_settings_help_lists_and_a_text(tmp_path):
    (tmp_path / "good.txt").write_text(
        "The island was settled by people who came from the sea. " * 9
    )
    command = [sys.executable, "-c", SETTINGS + DONE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for names in (METHODS, checkpoints.ALIGNERS, corpora.NAMES):
        assert all(name in done.stdout for name in names)
