"""Suites: a file of named commands, each a cell whose result is kept in a folder as one document.

Each cell runs in a process of its own, so that its memory and its threads are measured alone, and
its command can be repeated by hand. A cell is finished when its document exists: a run that was
interrupted goes on with the next one, and `eval perplexity --keep` within its cell.
"""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.app import catalogue
from kvalign.app.arguments import parse
from kvalign.app.commands.eval_run import RunSettings
from kvalign.app.listing import suites
from kvalign.errors import RunError, UserError
from kvalign.eval.results_folder import PREPARED, SUITE_FILE
from kvalign.eval.suite_file import Suite, parse_suite_text
from kvalign.files import locked, read_json, write_text


@dataclass(frozen=True)
class Cell:
    """One command of a suite.

    Attributes:
        name: unique in the suite; its document is NAME.json.
        command: as `Settings.command_line` writes it, `kvalign` first; {out} stands for the folder
            of the results, which may be moved.
        is_preparation: other cells need it; what it prints may be any JSON document.
    """

    name: str
    command: str
    is_preparation: bool = False


def run_suite(settings: RunSettings) -> dict[str, str]:
    """Run the cells that the folder lacks, preparations first and in order.

    Returns:
        for each cell `run`, or `kept` if it was finished before.

    Raises:
        UserError: an unknown or wrong suite, a wrong command in it, or a folder with the results
            of another suite; before any work.
        RunError: a cell failed; finished cells are kept.
    """
    text = read_suite(settings.suite)
    cells = parse_suite(text, settings.suite, settings.override, settings.variables)
    missing = [cell for cell in cells if not is_finished(cell, settings.out)]
    path = settings.out / SUITE_FILE
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{settings.out} has the results of another suite: name another --out")
    with locked(settings.out):
        write_text(path, text)
        _run(missing, settings)
    return {cell.name: "run" if cell in missing else "kept" for cell in cells}


def _run(cells: list[Cell], settings: RunSettings) -> None:
    """Run cells and keep what they print; with `ray` the evaluations run side by side."""
    parallel = [cell for cell in cells if settings.ray and not cell.is_preparation]
    for cell in cells:
        if cell not in parallel:
            print(f"== {cell.name}: {cell.command}", file=sys.stderr)
            keep(cell, settings.out, run_cell(cell.command, settings.out))
    if parallel:
        from kvalign.app.suite_on_ray import run_on_ray

        for cell, output in run_on_ray(parallel, settings):
            keep(cell, settings.out, output)


def read_suite(name: str) -> str:
    """The text of a shipped suite or of a file.

    Raises:
        UserError: no such suite.
    """
    shipped = suites()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error}") from None
    raise UserError(f"no suite {name!r} (known: {', '.join(sorted(shipped))}; or a .yaml file)")


def parse_suite(text: str, name: str, override: str = "", variables: str = "") -> list[Cell]:
    """The cells of a suite, preparations first, their commands checked.

    Args:
        text: as `kvalign.eval.suite_file` reads it.
        name: of the suite, for messages.
        override: flags that replace those of the cells which know them.
        variables: NAME=VALUE of the suite's variables that change.

    Raises:
        UserError: anything that is wrong in it, a flag to override that no cell has, or a variable
            that the suite has not.
    """
    suite = parse_suite_text(text, name)
    changed = _changed(suite, variables, name)
    steps = [*suite.prepare, *suite.cells]
    if len({step.name for step in steps}) < len(steps):
        raise UserError(f"suite {name} has two cells of one name")
    new = _flags(_split("--override", override))
    cells, known = [], set[str]()
    for number, step in enumerate(steps):
        if not step.name.replace("-", "").isalnum():
            raise UserError(
                f"suite {name}: a cell's name has letters, digits and -, got {step.name!r}"
            )
        where = f"suite {name}, cell {step.name}"
        try:
            command, known_flags = _overridden(suite.words(step, changed), new, where)
        except ValueError as error:  # shlex's, too
            raise UserError(f"{where}: {error}") from error
        cells.append(Cell(step.name, command, is_preparation=number < len(suite.prepare)))
        known |= known_flags
    if useless := set(new) - known:
        raise UserError(f"suite {name} has no cell with {', '.join(sorted(useless))}")
    return cells


def _changed(suite: Suite, variables: str, name: str) -> dict[str, str]:
    """The values of `variables`, a text of NAME=VALUE."""
    changed = {}
    for word in _split("--variables", variables):
        variable, equals, value = word.partition("=")
        if not equals or variable not in suite.variables:
            known = ", ".join(suite.variables) or "none"
            raise UserError(
                f"--variables takes NAME=VALUE of suite {name}'s variables ({known}), got {word!r}"
            )
        changed[variable] = value
    return changed


def _overridden(words: list[str], new: dict[str, list[str]], where: str) -> tuple[str, set[str]]:
    """A command, checked, with those of the new flags that it knows, and all that it knows."""
    command, words = catalogue.find(words)
    known = command.settings_for(words).flags()
    flags = _flags(words) | {flag: values for flag, values in new.items() if flag in known}
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    settings, _ = parse(command.settings_for(words), words, f"{where}: kvalign {command.name}")
    return settings.command_line(command.name), known


def is_finished(cell: Cell, out: Path) -> bool:
    """Whether the cell's document exists.

    Raises:
        UserError: it is damaged, or another command's.
    """
    path = _path(cell, out)
    if not path.exists():
        return False
    if read_json(path).get("command") != cell.command:
        raise UserError(f"{path} has another command's result: delete it or name another --out")
    return True


def run_cell(command: str, out: Path) -> str:
    """Run a cell's command in a process of its own and return what it prints, a JSON document.

    Raises:
        RunError: it failed; its own message is on stderr.
    """
    words = [word.replace("{out}", str(out)) for word in shlex.split(command)]
    words = [sys.executable, "-m", *words, "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        command = shlex.join(words[2:])
        raise RunError(f"exit code {done.returncode} of {command}; finished cells are kept")
    return done.stdout


def keep(cell: Cell, out: Path, output: str) -> None:
    """Write what a cell printed as its document."""
    printed = json.loads(output)
    document: dict[str, Any] = {"result": printed} if cell.is_preparation else printed
    document["command"] = cell.command
    path = _path(cell, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document) + "\n")


def _path(cell: Cell, out: Path) -> Path:
    return out / (PREPARED if cell.is_preparation else ".") / f"{cell.name}.json"


def _split(flag: str, text: str) -> list[str]:
    """The words of a flag's text, as a shell sees them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{flag} {text!r}: {error}") from None


def _flags(words: list[str]) -> dict[str, list[str]]:
    """Flags, each with the words after it."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            values = flags[word] = []
        elif flags:
            values.append(word)
        else:
            raise UserError(f"flags begin with --, got {word!r}")
    return flags
