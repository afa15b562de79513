"""The suite `learned-positions` on a machine that is at hand for minutes: each cell after what is
prepared for it, each step with a limit, each finding printed as it comes.

    python tests/scripts/learned_positions.py --out build/learned-positions --minutes 13
    python tests/scripts/learned_positions.py --small --minutes 3

For an interpreter that has torch and transformers, and what the steps import; the checkout need not
be installed. A step that fails or takes too long is told, and what needs it is left out. The same
command goes on where it stopped, and so does `kvalign eval run learned-positions`. `--small` is a
model that a CPU trains in a minute.
"""

import argparse
import multiprocessing
import shlex
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.extend(map(str, Path(__file__).parents[1:3]))  # the checkout need not be installed
from helpers.result_parts import with_what_it_reads

from kvalign.app.cli.main import main as kvalign
from kvalign.app.suites import suite
from kvalign.app.suites.suite import Cell, identity_of_cell, is_finished, keep
from kvalign.eval.report import SUITE_FILE
from kvalign.foundation.files import read_json, write_text

SUITE = "learned-positions"
SMALL = (
    "text=python-source:2 layers=4 hidden=256 context=256 vocabulary=2048 rows=8 minutes=0.5 "
    "length=251 sizes=16,64,250 table_tokens=30000 recorded=5600 shifts=1,8,64 steps=20 "
    "residual_steps=3 labels=300 labels_of_networks=40 trials=1"
)
STEP_MINUTES, MODEL_MINUTES = 2.5, 9.0
"""Most that a step takes, and the pre-training with the reading of its text."""
MOST_TIME = 1.05
"""An aligner wins at this much of the time of discard-half, where its perplexity is lower."""
_PRELOADED = [
    "transformers.models.gpt2.modeling_gpt2",
    "kvalign.eval.evaluations.latency.timing",
    "kvalign.eval.evaluations.perplexity.scores",
    "kvalign.training.network_run",
    "kvalign.training.pretraining",
    "kvalign.training.text_run",
]


def run(command: str, path: Path) -> None:
    """A command in a process of its own: what it prints goes to a file, its exit code is that."""
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file):
        code = kvalign([*shlex.split(command)[1:], "--json"])
    sys.exit(code)


def measured(cell: Cell, out: Path, seconds: float) -> str:
    """Run a step and keep its document; "" or what went wrong."""
    there = cell.at(out)
    identity = identity_of_cell(there)
    printed = out / f".{cell.name}.printed"
    context = multiprocessing.get_context("forkserver")  # which imports torch once
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=run, args=(there.command, printed))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.terminate()
        process.join(10)
        process.kill()
        return f"stopped after {seconds:.0f} s"
    if process.exitcode:
        return f"exit code {process.exitcode}"
    keep(cell, out, printed.read_text(encoding="utf-8"), identity=identity)
    printed.unlink()
    return ""


def findings(name: str, out: Path) -> list[str]:
    """The rows of a cell, a line each."""
    lines = []
    for row in read_json(out / f"{name}.json")["rows"]:
        aligner = f" ({row['aligner']})" if row["aligner"] else ""
        if "perplexity" in row:
            found = (
                f"perplexity {row['perplexity']:.2f}, {_ratio(row)} of {row['num_labels']} labels"
            )
        else:
            found = f"{row['mean_ms']:.2f} ms a step, ratio {row['ratio']:.3f}"
        lines.append(f"C = {row['cache_size']}, {row['method']}{aligner}: {found}")
    return lines


def verdicts(aligner: str, out: Path) -> list[str]:
    """Where an aligner wins, by both of its cells; nothing while one is missing."""
    paths = [out / f"{what}-{aligner}.json" for what in ("perplexity", "time")]
    if not all(path.exists() for path in paths):
        return []
    text, clock = ({r["cache_size"]: r for r in _of_kvalign(path)} for path in paths)
    return [
        f"C = {size}, {aligner}: {'WINS' if wins(row, clock[size]) else 'does not win'}: "
        f"{_ratio(row)}, time {clock[size]['ratio']:.3f}"
        for size, row in text.items()
    ]


def wins(text: dict[str, Any], clock: dict[str, Any]) -> bool:
    """Decided beforehand."""
    return (text["ratio_high"] or 2) < 1 and clock["ratio"] <= MOST_TIME


def _of_kvalign(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_json(path)["rows"] if row["method"] == "kvalign"]


def _ratio(row: dict[str, Any]) -> str:
    high = "?" if row["ratio_high"] is None else f"{row['ratio_high']:.3f}"
    return f"ratio {row['ratio']:.3f} ({row['ratio_low']:.3f} to {high})"


def run_suite(out: Path, minutes: float, override: str, variables: str) -> list[str]:
    """Run what is missing; return the cells that were not measured."""
    text, end = suite.read_suite(SUITE), time.monotonic() + 60 * minutes
    cells = suite.parse_suite(text, SUITE, override, variables)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / SUITE_FILE, text)
    failed = dict[str, str]()
    for cell in (cell for cell in cells if not cell.is_preparation):
        for step in with_what_it_reads(cells, cell.name):
            start = time.monotonic()
            limit = 60 * (MODEL_MINUTES if step.name == "model" else STEP_MINUTES)
            if step.name in failed:
                failed[cell.name] = f"{step.name} is missing"
            elif not is_finished(step, out):
                left = end - start
                fault = measured(step, out, min(limit, left)) if left > 0 else "no time was left"
                if fault:
                    failed[step.name] = fault
                    failed.setdefault(cell.name, f"{step.name}: {fault}")
                print(
                    f"{step.name}: {fault or 'done'} ({time.monotonic() - start:.0f} s)", flush=True
                )
            if cell.name in failed:
                break
        else:
            print(*findings(cell.name, out), sep="\n", flush=True)
            for line in verdicts(cell.name.partition("-")[2], out):
                print(line, flush=True)
    return [
        f"{cell.name}: not measured: {failed[cell.name]}"
        for cell in cells
        if cell.name in failed and not cell.is_preparation
    ]


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, default=Path("build", SUITE))
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--override", default="", help='as of kvalign eval run: "--captured"')
    parser.add_argument("--variables", default="", help="more of them")
    asked = parser.parse_args()
    variables = f"{SMALL if asked.small else ''} {asked.variables}"
    missed = run_suite(asked.out, asked.minutes, asked.override, variables)
    print(*missed, sep="\n", end="\n" if missed else "", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
