"""What CONTRIBUTING counts: a method, a policy, a kind of aligner, an evaluation and a corpus are a
file and a line each, a layout of rotary keys a module and lines of one other file.

Each of `extensions/` is added to one copy of the package and used there through the command line,
in one process for all: none knows of the others.
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
# Runs Python that it is sent, line by line of JSON, and sends back what `printed` is then.
SERVANT = """
import contextlib, io, json, shlex, sys
from kvalign.app.cli.main import main
from kvalign.eval.report import page
from kvalign.training import judge

judge.ROW_LABELS = 10  # an aligner is judged by so little text
page.inline_svg = page.inline_legend = lambda figure, name: "<svg></svg>"  # none are drawn
page.save = lambda figure, path: path.touch()

def run(*commands):
    printed = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if code := main(shlex.split(command)):
                sys.exit(code)
        printed.append(out.getvalue())
    return printed

for line in sys.stdin:
    printed = None
    exec(json.loads(line))
    print(json.dumps(printed), flush=True)
"""


class Copy:
    """A copy of the package, and what was changed in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        skip = shutil.ignore_patterns("checkpoints", "results")
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
        """What each command prints."""
        return self.python(f"printed = run(*{commands!r})")

    def python(self, code: str) -> list[str]:
        """What `printed` is after this code; a process that it ends has a successor."""
        complaints = self.folder / "stderr.txt"
        if self.process is None:
            with complaints.open("w") as stderr:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", SERVANT],
                    cwd=self.folder,
                    env=os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            self.end()
            pytest.fail(complaints.read_text()[-3000:])
        return json.loads(line)

    def end(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """With all extensions."""
    copy = Copy(tmp_path_factory.mktemp("copy"))
    for add in (add_method, add_policy, add_aligner, add_evaluation, add_corpus, add_layout):
        add(copy)
    yield copy
    copy.end()


def add_method(copy):
    copy.add("unmoved.py", "methods/unmoved.py")
    line = '        "unmoved": "kvalign.methods.unmoved:Unmoved",'
    copy.insert("methods/registry.py", '"kvalign.methods.streaming_llm:Window",\n', line)


def test_a_method_is_a_file_and_a_line(copy):
    methods, document = copy.run(
        "methods",
        "eval perplexity --methods unmoved,streaming-llm --cache-sizes 32 --num-tokens 20 --json",
    )
    assert "keeps sinks and a window and moves nothing" in methods
    rows = json.loads(document)["rows"]
    assert rows[0]["method"] == "unmoved"
    assert rows[0]["nll_nats"] == pytest.approx(rows[1]["nll_nats"])  # learned positions


def add_policy(copy):
    copy.add("value_norm.py", "policies/value_norm.py")
    line = '        "value-norm": "kvalign.policies.value_norm:ValueNorm",'
    copy.insert("policies/__init__.py", '"kvalign.policies.ours:H2O",\n', line)


def test_a_policy_is_a_file_and_a_line(copy):
    flags = "--methods kvalign --policy oldest,value-norm --cache-sizes 32 --num-tokens 20"
    policies, document = copy.run("policies", f"eval perplexity {flags} --json")
    assert "evicts the entry whose value has the smallest norm" in policies
    rows = json.loads(document)["rows"]
    assert [row["policy"] for row in rows] == ["oldest", "value-norm"]
    assert rows[0]["nll_nats"] != pytest.approx(rows[1]["nll_nats"])


def add_aligner(copy):
    copy.add("centred.py", "training/centred.py")
    line = '        "centred": "kvalign.training.centred:CentredAligner",'
    copy.insert("aligners/kinds.py", '"kvalign.aligners.table:TableAligner",\n', line)
    line = '        "centred": "kvalign.training.centred:train",'
    copy.insert("training/kinds.py", '"kvalign.training.kinds:train_table",\n', line)


def test_an_aligner_kind_is_a_file_and_a_line_in_each_registry(copy):
    sizes, trials = "--cache-sizes 32", "--aligner-kinds centred --num-trials 1 --trial-len 2"
    about, _, document, _ = copy.run(
        "train centred --help",
        "train centred --num-tokens 4000 --chunk-len 64 --out mine",
        f"eval perplexity {sizes} --num-tokens 20 --methods kvalign --aligner mine --json",
        f"eval latency {sizes} --methods kvalign,streaming-llm {trials}",
    )
    assert "means of keys and values" in about
    assert json.loads(document)["rows"][0]["aligner_label"] == "centred: nothing"


def add_evaluation(copy):
    copy.add("variety.py", "eval/evaluations/variety.py")
    line = '    "variety": "how many different tokens a method writes",'
    copy.insert("eval/evaluations/__init__.py", 'judge each answer",\n', line)


def test_an_evaluation_is_a_file_and_a_line(copy):
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


def add_corpus(copy):
    copy.add("numbers.py", "data_gen/numbers.py")
    line = '        "numbers": "kvalign.data_gen.numbers:Numbers",'
    copy.insert("data_gen/corpora.py", '"kvalign.data_gen.python_texts:PythonDocs",\n', line)


def test_a_corpus_is_a_file_and_a_line(copy):
    flags = "--methods window --cache-sizes 32 --num-tokens 20"
    corpora, _ = copy.run("corpora", f"eval perplexity --corpus numbers {flags}")
    assert "the numbers from 0 on" in corpora


def add_layout(copy):
    copy.add("rope_last.py", "models/rope_last.py")
    turns = "models/rope.py"
    copy.insert(
        turns,
        "        lambda first, second, rest: torch.cat(\n"
        "            [torch.stack([first, second], -1).flatten(-2), rest], -1\n"
        "        ),\n"
        "    ),\n}\n",
        "",
        "from kvalign.models.rope_last import LAST  # noqa: E402",
        "",
        'LAYOUTS["last"] = LAST',
    )


def test_a_layout_of_rotary_keys_is_a_module_and_lines_of_one_file(copy):
    copy.python(REENCODED)


# Llama, of whose keys the last 4 of 8 numbers are turned, under a name that no line has.
REENCODED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
import kvalign
from kvalign.models import rotation_of

right = modeling_llama.apply_rotary_pos_emb

def last(q, k, cos, sin):
    turned = right(q[..., 4:], k[..., 4:], cos, sin)
    return [torch.cat([x[..., :4], y], -1) for x, y in zip((q, k), turned)]

modeling_llama.apply_rotary_pos_emb = last

class Config(LlamaConfig):
    model_type = "turned-last"

class Model(LlamaForCausalLM):
    config_class = Config

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
torch.manual_seed(0)
sizes |= dict(vocab_size=96, max_position_embeddings=64, rope_parameters=rope)
model = Model(Config(**sizes)).eval()
model.model.rotary_emb.inv_freq = 1e4 ** -(torch.arange(2) / 2)
assert rotation_of(model).layout == "last"
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
modeling_llama.apply_rotary_pos_emb = right
"""
