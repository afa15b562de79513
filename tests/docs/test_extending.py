"""What CONTRIBUTING counts: a method, a policy, a kind of aligner, an evaluation and a corpus are a
file and a line each, a family of positions a module and lines of one other file.

Each of `extensions/` is added to a copy of the package and used there through the command line.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvalign

SOURCE = Path(kvalign.__file__).parent
EXTENSIONS = Path(__file__).with_name("extensions")
pytestmark = pytest.mark.slow
RUN = """
import contextlib, io, json, shlex, sys
from kvalign.app.cli.main import main

printed = []
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if code := main(shlex.split(command)):
            sys.exit(code)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


class Copy:
    """A copy of the package, and what was changed in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        skip = shutil.ignore_patterns("__pycache__", "checkpoints", "results")
        shutil.copytree(SOURCE, folder / "kvalign", ignore=skip)
        (folder / "kvalign" / "checkpoints").symlink_to((SOURCE / "checkpoints").resolve())

    def add(self, name: str, place: str) -> None:
        """One new file."""
        assert not (self.folder / "kvalign" / place).exists()
        shutil.copy(EXTENSIONS / name, self.folder / "kvalign" / place)

    def insert(self, file: str, after: str, *lines: str) -> None:
        """Lines after the one that `after` ends."""
        path = self.folder / "kvalign" / file
        text = path.read_text()
        assert text.count(after) == 1, f"{file}: {after!r}"
        path.write_text(text.replace(after, after + "".join(f"{line}\n" for line in lines)))

    def run(self, *commands: str) -> list[str]:
        """What each command prints, one after the other in one process."""
        return json.loads(self.python("-c", RUN, *commands))

    def python(self, *words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_a_method_is_a_file_and_a_line(copy):
    copy.add("unmoved.py", "methods/unmoved.py")
    line = '        "unmoved": "kvalign.methods.unmoved:Unmoved",'
    copy.insert("methods/__init__.py", '"kvalign.methods.window:Window",\n', line)
    methods, document = copy.run(
        "methods",
        "eval perplexity --methods unmoved,streaming-llm --cache-sizes 32 --num-tokens 20 --json",
    )
    assert "keeps sinks and a window and moves nothing" in methods
    rows = json.loads(document)["rows"]
    assert rows[0]["method"] == "unmoved"
    assert rows[0]["nll_nats"] == pytest.approx(rows[1]["nll_nats"])  # learned positions


def test_a_policy_is_a_file_and_a_line(copy):
    copy.add("value_norm.py", "policies/value_norm.py")
    line = '        "value-norm": "kvalign.policies.value_norm:ValueNorm",'
    copy.insert("policies/__init__.py", '"kvalign.policies.h2o:H2O",\n', line)
    flags = "--methods kvalign --policy oldest,value-norm --cache-sizes 32 --num-tokens 20"
    policies, document = copy.run("policies", f"eval perplexity {flags} --json")
    assert "the entry whose value has the smallest norm goes" in policies
    rows = json.loads(document)["rows"]
    assert [row["policy"] for row in rows] == ["oldest", "value-norm"]
    assert rows[0]["nll_nats"] != pytest.approx(rows[1]["nll_nats"])


def test_an_aligner_kind_is_a_file_and_a_line(copy):
    copy.add("centred.py", "training/kinds/centred.py")
    line = '        "centred": "kvalign.training.kinds.centred:CentredAligner",'
    copy.insert("aligners/kinds.py", '"kvalign.aligners.table:TableAligner",\n', line)
    sizes, trials = "--cache-sizes 32", "--aligner-kinds centred --num-trials 1 --trial-len 2"
    about, _, document, _ = copy.run(
        "train --aligner-kind centred --help",
        "train --aligner-kind centred --num-tokens 4000 --chunk-len 64 --out mine",
        f"eval perplexity {sizes} --num-tokens 20 --methods kvalign --aligner mine --json",
        f"eval latency {sizes} --methods kvalign,streaming-llm {trials}",
    )
    assert "means of keys and values" in about
    assert json.loads(document)["rows"][0]["aligner_label"] == "centred"


def test_an_evaluation_is_a_file_and_a_line(copy):
    copy.add("variety.py", "eval/evaluations/variety.py")
    line = '    "variety": "how many different tokens a method writes",'
    copy.insert("eval/evaluations/__init__.py", 'each answer judged",\n', line)
    suite = copy.folder / "mine.yaml"
    command = "eval variety --methods window,streaming-llm --cache-sizes 32 --num-tokens 20"
    suite.write_text(f"title: Mine\ncells:\n  - name: mine\n    command: {command}\n")
    about, _, shown = copy.run(
        "--help", "eval run mine.yaml --out results", "report results --terminal"
    )
    assert "how many different tokens a method writes" in about
    page = (copy.folder / "results" / "report.html").read_text()
    assert "Different tokens among those that a method wrote." in page
    assert "variety" in shown


def test_a_corpus_is_a_file_and_a_line(copy):
    copy.add("numbers.py", "data_gen/numbers.py")
    line = '        "numbers": "kvalign.data_gen.numbers:Numbers",'
    copy.insert("data_gen/corpora.py", '"kvalign.data_gen.python_docs:PythonDocs",\n', line)
    flags = "--methods window --cache-sizes 32 --num-tokens 20"
    corpora, _ = copy.run("corpora", f"eval perplexity --corpus numbers {flags}")
    assert "the numbers from 0 on" in corpora


def test_a_family_of_positions_is_a_module_and_lines_of_one_file(copy):
    copy.add("rope_interleaved.py", "models/rope_interleaved.py")
    models = "models/architectures.py"
    copy.insert(models, '    "mpt": "alibi",\n', '    "gptj": "interleaved",')
    copy.insert(
        models,
        "from kvalign.models.rope import Rotation\n",
        "from kvalign.models.rope_interleaved import InterleavedRotation",
    )
    copy.insert(
        models,
        "        is_bounded=_rope_kind(model.config) in _LENGTH_ROPE,\n    ),\n",
        '    "interleaved": lambda model: InterleavedRotation(',
        "        10_000 ** -(torch.arange(0, model.config.rotary_dim, 2) / 8)",
        "    ),",
    )
    copy.python("-c", REENCODED)


REENCODED = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import kvalign

sizes = dict(n_positions=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
config = AutoConfig.for_model("gptj", vocab_size=96, bos_token_id=0, eos_token_id=0, **sizes)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(2, 96, (1, 90))
method = kvalign.make_method("streaming-llm", model, cache_size=20)
for i in range(ids.shape[1]):
    method.feed(ids[:, i : i + 1])
cache = method.cache
positions = torch.arange(20) + cache.frame.num_behind(90)  # rotary positions run on
with torch.no_grad():
    kept = dict(input_ids=ids[:, cache.index()], position_ids=positions[None])
    clean = model(**kept, use_cache=True).past_key_values
assert torch.allclose(cache.layers[0].keys, clean.layers[0].keys, atol=2e-5)
"""
