"""Suites: a file of named commands. Each is a cell, and its result is one document in a folder.

Each cell runs in its own process, so that its memory and its threads are measured alone. A cell is
finished when its document exists, and is kept as long as its model has the same weights. An
interrupted run continues with the next cell, and with `--keep` within its cell.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvalign.app.cli import catalogue
from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import GIVEN
from kvalign.app.cli.next_steps import say_next
from kvalign.app.listing import suites
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.report import OUT, PREPARED, SUITE_FILE, Suite, parse_suite_text
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.files import locked, read_json, read_text, write_text
from kvalign.foundation.runs import PART_OF_RUN, keeping
from kvalign.foundation.settings import Settings, option

_IDENTITY = "identity"
"""Entry of a document: the identity of the cell's model; empty if it was not known."""
MAX_NAME = 100  # letters of a cell's name: it is a file's


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Run every cell of a suite whose result is not yet in the folder, then write the report.

    Suites: quick (a minute or two), full (every evaluation, short), reference (the shipped models),
    paper-distilgpt2 and paper-smollm2 (the paper's tables and figures), paper-gpt2-mini (the same
    experiments on a shipped model), learned-positions (a larger one), or a .yaml file of your own.

    Example:
        kvalign eval run quick --out results --override "--cache-sizes 32 --num-tokens 60"
    """

    suite: str = option(help="name of a suite, or a .yaml file", positional=True)
    out: Path = option(
        help="folder for results and report; finished cells in it are kept", writes="folder"
    )
    override: str = option(
        "",
        help='flags that replace those of the cells, such as "--device cuda"; with '
        "another --model, here or as a variable, a cell loses the suite's aligners",
    )
    variables: str = option(
        "", help='variables of the suite to change, such as "model=FOLDER corpus=text:mine.txt"'
    )


@dataclass(frozen=True)
class Cell:
    """One command of a suite, with checked settings; in these {out} is the folder of results."""

    name: str  # unique in the suite; its document is NAME.json
    kind: catalogue.Command
    settings: Settings
    is_preparation: bool = False  # others need it; what it prints may be any JSON document

    @property
    def command(self) -> str:
        """The same by hand, `kvalign` first."""
        return self.settings.command_line(self.kind.name)

    @property
    def model(self) -> str | None:
        """Name of the model that it loads, if it loads one."""
        return getattr(self.settings, "model", None)

    def at(self, out: Path) -> "Cell":
        """The cell with a folder for {out}."""
        values = {name: _filled(value, str(out)) for name, value in vars(self.settings).items()}
        return replace(self, settings=replace(self.settings, **values))

    def output(self) -> str:
        """JSON that it prints, in a process that reads its settings.

        Raises:
            UserError: it was refused.
            RunError: it failed.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
            json.dump(vars(self.settings), stdin, default=str)
            stdin.seek(0)
            process = subprocess.run(
                [sys.executable, "-m", "kvalign", *self.kind.words.split(), GIVEN],
                stdin=stdin,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env={**os.environ, PART_OF_RUN: "1"},
            )
        if code := process.returncode:
            error = UserError if code == 2 else RunError
            raise error(f"exit code {code} of {self.command}; finished cells are kept")
        return process.stdout

    def path(self, out: Path) -> Path:
        """Return where its document is."""
        return out / (PREPARED if self.is_preparation else ".") / f"{self.name}.json"


def _filled(value: Any, out: str) -> Any:
    """A value of settings with a folder for {out}."""
    if isinstance(value, tuple):
        return tuple(_filled(item, out) for item in value)
    return type(value)(str(value).replace(OUT, out)) if isinstance(value, str | Path) else value


def read_suite(name: str) -> str:
    """Text of a shipped suite or of a file."""
    shipped = suites()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.exists():
        return read_text(path)
    raise UserError(f"no suite {name!r} (known: {', '.join(sorted(shipped))}; or a .yaml file)")


def parse_suite(text: str, name: str, override: str = "", variables: str = "") -> list[Cell]:
    """Cells of a suite, preparations first, with their commands checked.

    `override` are flags that replace those of the cells which have them. `variables` are NAME=VALUE
    pairs that replace the suite's. With another --model, by either, a cell loses the aligners of
    the suite.
    """
    suite = parse_suite_text(text, name)
    values = values_of(suite, name, variables)
    steps = [*suite.prepare, *suite.cells]
    if not suite.cells:
        raise UserError(f"suite {name} has no cells: nothing to run")
    if len({step.name.casefold() for step in steps}) < len(steps):  # files, on any system
        raise UserError(f"suite {name} has two cells with the same name")
    new = _flags(_split("--override", override))
    cells, all_flags = [], set[str]()
    for number, step in enumerate(steps):
        if not step.name.replace("-", "").isalnum() or len(step.name) > MAX_NAME:
            raise UserError(
                f"suite {name}: a cell's name has at most {MAX_NAME} letters, digits and -, got "
                f"{step.name!r:.80}"
            )
        where, is_preparation = f"suite {name}, cell {step.name}", number < len(suite.prepare)
        try:
            command, flags = _checked(suite.words(step, values), is_preparation)
            shipped = _flags(_checked(suite.words(step, suite.variables), is_preparation)[1])
            settings = _overridden(command, flags, new, shipped, where)
        except ValueError as error:  # shlex's, too
            raise UserError(f"{where}: {error}") from error
        cells.append(Cell(step.name, command, settings, is_preparation))
        all_flags |= settings.flags()
    if useless := set(new) - all_flags:
        raise UserError(f"suite {name} has no cell with {', '.join(sorted(useless))}")
    return cells


def _checked(words: list[str], is_preparation: bool) -> tuple[catalogue.Command, list[str]]:
    """The command and its flags; UserError for one whose document a suite cannot use."""
    if not words:
        raise UserError("its command is empty")
    command, flags = catalogue.find(words)
    if is_preparation and not command.has_json:
        raise UserError(f"{command.name} prints no document, so it cannot be a preparation")
    evaluations = {f"{catalogue.FAMILY} {name}" for name in EVALUATIONS}
    if not is_preparation and command.name not in evaluations:
        raise UserError(f"{command.name} is not an evaluation: move preparations to prepare")
    return command, flags


def values_of(suite: Suite, name: str, variables: str) -> dict[str, str]:
    """The values of a suite's variables, changed by `variables`, a text of NAME=VALUE."""
    values = dict(suite.variables)
    for word in _split("--variables", variables):
        variable, equals, value = word.partition("=")
        if not equals or variable not in suite.variables:
            names = ", ".join(suite.variables) or "none"
            raise UserError(
                f"--variables takes NAME=VALUE of suite {name}'s variables ({names}), got {word!r}"
            )
        values[variable] = value
    return values


def _overridden(
    command: catalogue.Command,
    words: list[str],
    new: dict[str, list[str]],
    shipped: dict[str, list[str]],
    where: str,
) -> Settings:
    """Checked settings of words, with new flags; `shipped`: flags with the suite's variables."""
    own_flags, of_cell = command.settings.flags(), _flags(words)
    model, aligner = "--model", "--aligner"
    of_suite = of_cell.get(aligner) == shipped.get(aligner)
    if of_suite and new.get(model, of_cell.get(model)) != shipped.get(model):
        of_cell.pop(aligner, None)  # of another model
    flags = of_cell | {flag: values for flag, values in new.items() if flag in own_flags}
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    settings, _ = parse(command.settings, words, f"{where}: kvalign {command.words}")
    return settings


def _split(flag: str, text: str) -> list[str]:
    """The words of a flag's text, as a shell sees them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{flag} {text!r}: {error}") from None


def _flags(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            values = flags[word] = []
        elif flags:
            values.append(word)
        else:
            raise UserError(f"flags begin with --, got {word!r}")
    return flags


def eval_run(settings: RunSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.eval import write_report

    states = run_suite(settings)
    has_results = any(settings.out.glob("*.json"))  # preparations have none
    page = str(write_report(settings.out)) if has_results else None
    if not as_json:
        before = f"{list(states.values()).count('kept')} of them from before"
        print(f"{len(states)} cells in {settings.out}, {before}", file=sys.stderr)
        if page:
            print(f"report: {page}")
            say_next("report", settings.out, "--terminal")
    return {"out": str(settings.out), "cells": states, "report": page}


def run_suite(settings: RunSettings) -> dict[str, str]:
    """Run the cells whose document is missing, or whose model has other weights than at the time
    of it, preparations first and in order.

    Errors in the suite, its commands or the folder are raised before any work. Finished cells are
    kept when one fails.

    Returns:
        for each cell `run`, or `kept` if it was already finished.
    """
    text = read_suite(settings.suite)
    cells = parse_suite(text, settings.suite, settings.override, settings.variables)
    finished = [cell for cell in cells if is_finished(cell, settings.out)]
    outdated = with_other_weights(finished, settings.out)
    to_run = [cell for cell in cells if cell not in finished or cell in outdated]
    path = settings.out / SUITE_FILE
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{settings.out} has the results of another suite: name another --out")

    changed = " ".join(filter(None, (settings.variables, settings.override)))

    def summary() -> str:
        num = sum(is_finished(cell, settings.out) for cell in cells)
        return f"{num} of {len(cells)} cells are finished in {settings.out}" if num else ""

    with locked(settings.out, summary), keeping(summary):
        write_text(path, text)
        try:
            run_cells(to_run, settings.out, changed)
        except UserError as error:
            if summary():
                raise RunError(str(error)) from error
            raise
    return {cell.name: "run" if cell in to_run else "kept" for cell in cells}


def run_cells(cells: Sequence[Cell], out: Path, changed: str = "") -> None:
    """Run cells in order and keep what they print. A line before each says how long the rest takes.

    Raises:
        UserError: a cell was refused.
        RunError: a cell failed.
    """
    began = time.perf_counter()
    for number, cell in enumerate(cells):
        there, left = cell.at(out), ""
        if number:  # by the speed of those before
            seconds = (time.perf_counter() - began) * (len(cells) / number - 1)
            left = f", about {timedelta(seconds=round(seconds))} left"
        about = f"{cell.name}: {there.command}"
        print(f"== {number + 1} of {len(cells)}{left}, {about}", file=sys.stderr)
        identity = identity_of_cell(there)  # as it begins
        keep(cell, out, there.output(), changed, identity)


def is_finished(cell: Cell, out: Path) -> bool:
    """Return whether the cell's document exists; UserError if damaged, or another command's."""
    path = cell.path(out)
    if not path.exists():
        return False
    if read_json(path).get("command") != cell.command:
        raise UserError(f"{path} has another command's result: delete it or name another --out")
    return True


def with_other_weights(finished: list[Cell], out: Path) -> list[Cell]:
    """The finished cells whose model has other weights now, with a line for each."""
    cells, identities = [], dict[str, str]()  # by model, each of which is loaded once
    for cell in finished:
        if (name := (there := cell.at(out)).model) is None:
            continue
        before = read_json(cell.path(out)).get(_IDENTITY)
        if name not in identities:
            identities[name] = identity_of_cell(there)
        if (now := identities[name]) and now != before:
            print(f"{cell.name} runs again: {name} has other weights now", file=sys.stderr)
            cells.append(cell)
    return cells


def identity_of_cell(cell: Cell) -> str:
    """The identity of a cell's model; empty without one, or if it is not here."""
    from kvalign.models.identity import identity_of

    try:
        return identity_of(cell.model) if cell.model else ""
    except UserError:
        return ""


def keep(cell: Cell, out: Path, output: str, changed: str = "", identity: str = "") -> None:
    """Write a cell's output as its document, with changes to the suite and the model's identity."""
    printed = json.loads(output)
    document: dict[str, Any] = {"result": printed} if cell.is_preparation else printed
    document |= {"command": cell.command, _IDENTITY: identity}
    if changed:
        document["changed"] = changed
    path = cell.path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document) + "\n")
