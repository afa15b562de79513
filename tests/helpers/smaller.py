"""Documented commands, made small enough to run them all in a test: fewer tokens and trials, and
little text in place of Python's documentation.
"""

import contextlib
import dataclasses
import inspect
import io
import shlex
from collections.abc import Mapping
from typing import Any

from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import COMMANDS, Command, find
from kvalign.app.cli.main import main
from kvalign.foundation.settings import Settings

# Settings of a command that are no larger, given or not.
_SMALLER = {
    "pretrain": dict(num_tokens=2048, context_len=64, num_layers=1, hidden_size=64),
    "tune": dict(num_trials=1, max_epochs=1, max_steps=4),
    "generate": dict(max_new_tokens=80),
    "chat": dict(max_new_tokens=20),
    "gen-data": dict(num_tokens=2560),
    "train": dict(num_tokens=2600, max_steps=2, chunk_len=256),
    "tune-memory": dict(num_tokens=300),
    "verify": dict(cache_size=16, num_steps=20, invariants=("dense", "chunks", "save")),
    "eval perplexity": dict(num_tokens=12, cache_sizes=(32, 64)),
    "eval latency": dict(
        cache_sizes=(32,), num_trials=1, trial_len=2, batch_sizes=(1, 2), generate=3
    ),
    "eval frontier": dict(cache_sizes=(32,), num_tokens=12, num_trials=2, trial_len=1),
    "eval readability": dict(cache_sizes=(32,), num_prompts=1, max_new_tokens=12),
    "eval streameval": dict(cache_sizes=(32,), distances=(0,), num_lines=2, query_every=2),
    "eval recall": dict(cache_sizes=(32,), num_questions=2),
    "eval needle": dict(distances=(1,), num_streams=1, gap=10),
    "eval told": dict(talk=(1,)),
    "eval edit": dict(lengths=(8,), num_before=16, num_after=17, num_future=8, num_edits=2),
    "eval attention": dict(cache_sizes=(32,), num_texts=2, num_steps=1),
}
SMALLER = {(command, name): x for command, of in _SMALLER.items() for name, x in of.items()}
# Likewise what stands in Python: in pages, examples and the notebook.
SMALLER_PYTHON = {
    "max_new_tokens=20_000": "max_new_tokens=300",
    "max_new_tokens=2000": "max_new_tokens=80",
    "max_new_tokens=500": "max_new_tokens=80",
    "range(1000)": "range(300)",
    "num_tokens=100_000": "num_tokens=2_600",
    "cache_sizes=[32, 64]": "cache_sizes=[32], num_tokens=12",
    'load_model("llama-mini").model\noutcomes': 'load_model("recall-llama").model\noutcomes',
    'settled by fishermen. " * 50': 'settled by fishermen. " * 10',  # of `short_runs`
    'from the mainland. " * 20': 'from the mainland. " * 6',
    "max_new_tokens=600": "max_new_tokens=70",
    "range(600)": "range(70)",
    "NUM_LABELS = 800": "NUM_LABELS = 220",
    "CACHE_SIZE, NUM_SINKS = 64": "CACHE_SIZE, NUM_SINKS = 16",
    '"sliding_window": 64': '"sliding_window": 16',
    "num_steps=1000": 'num_steps=20, invariants=["dense", "chunks", "save"]',
}
TEXT = "".join(
    f"In {1400 + 7 * i} the harbour of the island was built anew by {i % 11 + 2} families.\n"
    + "\n" * (i % 3 == 0)
    for i in range(600)
)

# Likewise inside: the text that a tokenizer, an objective or a memory's plan sees, Python's
# documentation, and the labels that an aligner is judged by, which are too few for a verdict. What
# memory a method takes is left to test_latency.py: the profiler takes longer than the steps.
INSIDE = {
    "kvalign.training.pretraining_inputs._TOKENIZER_CHARS": 100_000,
    "kvalign.training.table_run.STEP_TOKENS": 128,
    "kvalign.training.table_run.TEACHER_TOKENS": 128,
    "kvalign.training.judge.ROW_LABELS": 10,
    "kvalign.eval.evaluations.latency.timing._peak_mb": lambda method, *about: (
        method.reset() or 1.0
    ),
    "kvalign.training.recall_tuning.AWAY": 1,
    "kvalign.training.recall_tuning.APART": 40,
    "kvalign.eval.evaluations.edit.ways.NUM_TIMED": 1,
    "kvalign.data_gen.corpus.RECALL_LEN": {"train": 4000, "test": 4000},
    "kvalign.data_gen.python_texts.python_docs": lambda split: [TEXT],
}
ENOUGH_LABELS = 220
"""`ROW_LABELS` where there is to be a verdict."""
# A report without pictures, which take longer than all else.
UNDRAWN = {
    "kvalign.eval.report.page.inline_svg": lambda figure, name: "<svg></svg>",
    "kvalign.eval.report.page.inline_legend": lambda figure, name: "<svg></svg>",
    "kvalign.eval.report.page.save": lambda figure, path: path.touch(),
}


def examples(command: str) -> list[list[str]]:
    """The words after `kvalign` of the examples in a command's help, one a kind."""
    return [_example(command, cls) for cls in Command(command).all_settings().values()]


def example(command: str) -> list[str]:
    """The words after `kvalign` of the example in a command's help."""
    return _example(command, Command(command).settings)


def _example(command: str, settings_type: type[Settings]) -> list[str]:
    text = inspect.cleandoc(settings_type.__doc__ or "").partition("Example:")[2].strip()
    assert "\n" not in text, "an example is one line, to be copied as it stands"
    words = shlex.split(text)
    assert words[: 1 + len(command.split())] == ["kvalign", *command.split()]
    return words[1:]


def command_of(words: list[str]) -> str:
    """`eval perplexity` of the words after `kvalign`."""
    return " ".join(words[:2]) if words[0] == "eval" else words[0]


def smaller(words: list[str], limits: Mapping[tuple[str, str], Any] = SMALLER) -> list[str]:
    """The words after `kvalign`, with no setting above its limit.

    Settings that are not given count with their defaults; None is above any limit.
    """
    command = command_of(words)
    assert command in COMMANDS, f"no command {command!r}"
    one, args = find(words)
    settings, as_json = parse(one.settings, args, f"kvalign {command}")
    changes = {}
    if getattr(settings, "text", None):  # written already: there is nothing to make smaller
        limits = {}
    for (of, name), limit in limits.items():
        value = getattr(settings, name, limit) if of == command else limit
        if value is None or value > limit:
            changes[name] = limit
    made = dataclasses.replace(settings, **changes).command_line(command)
    return [*shlex.split(made)[1:], *["--json"] * as_json]


def smaller_python(code: str) -> str:
    for large, small in SMALLER_PYTHON.items():
        code = code.replace(large, small)
    return code


def run_cell(cell, kept={}):  # noqa: B006
    """As `eval_run.Cell.output`, smaller, with one aligner of the shipped suites' two,
    in this process, and once for all pages.
    """
    command = cell.command.replace("kvalign-gpt2-mini-network,", "")
    words = [*smaller(shlex.split(command)[1:]), "--json"]
    key = shlex.join(words)
    if key not in kept or "--out" in words:
        kept[key] = output_of(words)
    return kept[key]


def one_trial(out, settings, base):
    """In place of a sweep's trials on Ray, of which there are in test_sweep.py."""
    from kvalign.training.sweep_ray import Reports, Trial, settings_at, train_trial

    point = {"hidden1": 8, "hidden2": 4, "batch_size": settings.min_batch_size, "lr": 0.01}
    run, sent = settings_at(base, point), []
    train_trial(run, out / "trials" / "000", Reports(sent.append, run.vals_per_epoch))
    return [Trial("000", point, sent)]


def output_of(words):
    """What a command prints; it must end well and print something."""
    printed, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
        code = main(words)
    assert code == 0, f"kvalign {shlex.join(words)}: {complaints.getvalue()[-2000:]}"
    assert printed.getvalue().strip(), f"kvalign {shlex.join(words)} prints nothing"
    return printed.getvalue()
