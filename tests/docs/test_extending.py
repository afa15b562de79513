"""What CONTRIBUTING counts: a method, a policy, a kind of aligner, an evaluation and a corpus are a
file and a line each, a layout of rotary keys a module and lines of one other file.

All of `extensions/`, and the files of two tutorials, are added to one copy of the package, and used
there through the command line, in one process: none knows of the others.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.doc_pages import blocks

import kvalign

SOURCE = Path(kvalign.__file__).parent
EXTENSIONS = Path(__file__).with_name("extensions")
pytestmark = pytest.mark.slow
PLACES = {"centred.py": "training", "variety.py": "eval/evaluations"}
PLACES |= {"numbers.py": "data_gen", "rope_last.py": "models"}
TUTORIALS = ("docs/tutorials/method.md", "docs/tutorials/policy.md")
# What is added to a registry: its file, the entry before, the name, and where it is.
CENTRED, TEXTS = "training.centred", "data_gen.python_texts"
ENTRIES = [
    ("methods/registry.py", "methods.cached:Window", "unmoved", "methods.unmoved:Unmoved"),
    ("policies/__init__.py", "policies.base:H2O", "value-norm", "policies.value_norm:ValueNorm"),
    (
        "aligners/kinds.py",
        "aligners.table:TableAligner",
        "centred",
        "training.centred:CentredAligner",
    ),
    ("training/kinds.py", "training.kinds:train_table", "centred", f"{CENTRED}:train"),
    (
        "data_gen/corpora.py",
        "data_gen.python_texts:PythonDocs",
        "numbers",
        "data_gen.numbers:Numbers",
    ),
]
ROPE = '\nfrom kvalign.models.rope_last import LAST  # noqa: E402\n\nLAYOUTS["last"] = LAST\n'
# What is added to a file, after what ends a line there.
LINES = [(x, f'"kvalign.{a}",\n', f'        "{n}": "kvalign.{b}",\n') for x, a, n, b in ENTRIES] + [
    (
        "eval/evaluations/__init__.py",
        'before and after the sinks are evicted",\n',
        '    "variety": "how many different tokens a method writes",\n',
    ),
    ("models/rope.py", "second], -1).flatten(-2), rest], -1\n        ),\n    ),\n}\n", ROPE),
]
SMALL = "--cache-sizes 32 --num-tokens 20"
SUITE = f"""
title: Mine
cells:
  - name: mine
    command: eval variety --methods window,streaming-llm {SMALL}
"""
COMMANDS = {
    "methods": "list methods",
    "unmoved": f"eval perplexity --methods unmoved,streaming-llm {SMALL} --json",
    "policies": "list policies",
    "value-norm": f"eval perplexity --methods kvalign --policy oldest,value-norm {SMALL} --json",
    "help of train": "train centred --help",
    "train": "train centred --num-tokens 2600 --chunk-len 64 --out mine",
    "centred": f"eval perplexity {SMALL} --methods kvalign --aligner mine --json",
    "latency": "eval latency --cache-sizes 32 --methods kvalign,streaming-llm "
    "--aligner-kinds centred --num-trials 1 --trial-len 2",
    "help": "--help all",
    "run": "eval run mine.yaml --out results",
    "report": "report results --terminal",
    "corpora": "list corpora",
    "numbers": f"eval perplexity --corpus numbers --methods window {SMALL}",
}
# Runs commands that it is sent, then tries the layout, and prints what each printed.
PROGRAM = """
import contextlib, io, json, shlex, sys
from kvalign.app.cli.main import main
from kvalign.app.commands import eval_run
from kvalign.eval.evaluations.latency import timing
from kvalign.eval.report import page
from kvalign.training import judge

timing._peak_mb = lambda method, *_: method.reset() or 1.0  # as in helpers/smaller.py
judge.ROW_LABELS = 10  # an aligner is judged by so little text
page.inline_svg = page.inline_legend = lambda figure, name: "<svg></svg>"  # none are drawn
page.save = lambda figure, path: path.touch()

def run(words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if code := main(words):
            sys.exit(code)
    return out.getvalue()

eval_run.Cell.output = lambda cell: run([*shlex.split(cell.command)[1:], "--json"])  # here
printed = {name: run(shlex.split(x)) for name, x in json.load(sys.stdin).items()}
"""
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
ids = torch.randint(2, 96, (1, 90))
method = kvalign.make_method("streaming-llm", model, cache_size=20)
for i in range(ids.shape[1]):
    method.feed(ids[:, i : i + 1])
cache = method.cache
positions = torch.arange(20) + cache.frame.num_behind(90)  # rotary positions run on
with torch.no_grad():
    kept = dict(input_ids=ids[:, cache.index()], position_ids=positions[None])
    clean = model(**kept, use_cache=True).past_key_values
printed["layout"] = rotation_of(model).layout
printed["clean"] = torch.allclose(cache.layers[0].keys, clean.layers[0].keys, atol=2e-5)
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the package, with all extensions."""
    folder = tmp_path_factory.mktemp("copy")
    package, skip = folder / "kvalign", shutil.ignore_patterns("checkpoints", "results")
    shutil.copytree(SOURCE, package, ignore=skip)
    (package / "checkpoints").symlink_to((SOURCE / "checkpoints").resolve())
    for name, place in PLACES.items():
        assert not (package / place / name).exists()
        shutil.copy(EXTENSIONS / name, package / place)
    for page in TUTORIALS:
        (file,) = (block for block in blocks(page) if block.title)
        assert not (folder / file.title).exists()
        (folder / file.title).write_text(file.text)
    for name, after, added in LINES:
        text = (package / name).read_text()
        assert text.count(after) == 1, f"{name}: {after!r}"
        (package / name).write_text(text.replace(after, after + added))
    (folder / "mine.yaml").write_text(SUITE)
    return folder


@pytest.fixture(scope="module")
def printed(folder):
    """What each command prints, and how the layout is found."""
    command = [sys.executable, "-c", PROGRAM + REENCODED]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    how = dict(input=json.dumps(COMMANDS), capture_output=True, text=True)
    done = subprocess.run(command, cwd=folder, env=environment, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_method_is_a_file_and_a_line(printed):
    assert "keeps sinks and a window and moves nothing" in printed["methods"]
    rows = json.loads(printed["unmoved"])["rows"]
    assert rows[0]["method"] == "unmoved"
    assert rows[0]["nll_nats"] == pytest.approx(rows[1]["nll_nats"])  # learned positions


def test_a_policy_is_a_file_and_a_line(printed):
    assert "evicts the entry whose value has the smallest norm" in printed["policies"]
    rows = json.loads(printed["value-norm"])["rows"]
    assert [row["policy"] for row in rows] == ["oldest", "value-norm"]
    assert rows[0]["nll_nats"] != pytest.approx(rows[1]["nll_nats"])


def test_an_aligner_kind_is_a_file_and_a_line_in_each_registry(printed):
    assert "means of keys and values" in printed["help of train"]
    assert json.loads(printed["centred"])["rows"][0]["aligner_label"] == "centred: nothing"


def test_an_evaluation_is_a_file_and_a_line(printed, folder):
    assert "how many different tokens a method writes" in printed["help"]
    page = (folder / "results" / "report.html").read_text()
    assert "Different tokens among those that a method wrote." in page
    assert "variety" in printed["report"]


def test_a_corpus_is_a_file_and_a_line(printed):
    assert "the numbers from 0 on" in printed["corpora"]


def test_a_layout_of_rotary_keys_is_a_module_and_lines_of_one_file(printed):
    assert printed["layout"] == "last" and printed["clean"]
