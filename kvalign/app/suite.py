"""Suites: a file of named commands, each a cell whose result is kept in a folder as one document.

A cell is run by a process of its own, so its memory and threads are its own, and its command can be
repeated by hand. It is finished when its document is there; a run that was interrupted takes up
there, and perplexity within its cell (`--keep`).
"""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvalign.app import catalogue
from kvalign.app.arguments import parse
from kvalign.app.commands.eval_run import RunSettings
from kvalign.app.listing import suites
from kvalign.errors import RunError, UserError
from kvalign.eval.results_folder import SUITE_FILE
from kvalign.files import locked, write_text


@dataclass(frozen=True)
class Cell:
    """One command of a suite.

    Attributes:
        name: unique in the suite; its document is NAME.json.
        command: as `Settings.command_line` writes it, `kvalign` first; {out} stands for the folder
            of the results, which may be moved.
        is_preparation: what other cells need; has a document of any form.
    """

    name: str
    command: str
    is_preparation: bool = False


def run_suite(settings: RunSettings) -> dict[str, str]:
    """Run the cells that the folder lacks, preparations first and in order.

    Returns:
        By cell: `kept` or `run`.

    Raises:
        UserError: an unknown or wrong suite, a wrong command in it, or a folder with the results
            of another one; before any work.
        RunError: a cell failed; those finished before it are kept.
    """
    text = read_suite(settings.suite)
    cells = parse_suite(text, settings.suite, settings.override)
    missing = [cell for cell in cells if not is_finished(cell, settings.out)]
    there = settings.out / SUITE_FILE
    if there.exists() and there.read_text(encoding="utf-8") != text:
        raise UserError(f"{settings.out} has the results of another suite: name another --out")
    with locked(settings.out):
        write_text(there, text)
        _run(missing, settings)
    return {cell.name: "run" if cell in missing else "kept" for cell in cells}


def _run(missing: list[Cell], settings: RunSettings) -> None:
    """Run cells and keep what they print; what needs no other cell side by side if asked."""
    later = [cell for cell in missing if not cell.is_preparation]
    for cell in missing if not settings.ray else [c for c in missing if c.is_preparation]:
        print(f"== {cell.name}: {cell.command}", file=sys.stderr)
        keep(cell, settings.out, run_cell(cell.command, settings.out))
    if settings.ray and later:
        from kvalign.app.suite_on_ray import run_on_ray

        for cell, output in run_on_ray(later, settings):
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
        return path.read_text(encoding="utf-8")
    raise UserError(f"no suite {name!r} (known: {', '.join(sorted(shipped))}; or a .yaml file)")


def parse_suite(text: str, name: str, override: str = "") -> list[Cell]:
    """The cells of a suite, their commands checked.

    Args:
        text: YAML with `title`, `about`, `cells` and perhaps `prepare`: lists of `name` and
            `command`. `paper` is for the report.
        name: of the suite, for messages.
        override: flags that replace those of the cells which know them.

    Raises:
        UserError: anything that is wrong in it, or a flag to override that no cell has.
    """
    try:
        suite = yaml.safe_load(text)
        steps = [(step, True) for step in suite.get("prepare", ())]
        steps += [(step, False) for step in suite["cells"]]
        named = [(step["name"], step["command"], first) for step, first in steps]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"suite {name} is not understood ({error}): it needs a list `cells` of name and command"
        ) from error
    if len({name for name, _, _ in named}) < len(named):
        raise UserError(f"suite {name} has two cells of one name")
    new = _groups(shlex.split(override))
    cells, known = [], set[str]()
    for cell, command, first in named:
        if not str(cell).replace("-", "").isalnum():
            raise UserError(f"suite {name}: a cell's name has letters, digits and -, got {cell!r}")
        words = shlex.split(command)
        try:
            known_command, flags = catalogue.find(words)
        except UserError as error:
            raise UserError(f"suite {name}, cell {cell}: {error}") from error
        verb, cls = known_command.name, known_command.settings_for(flags)
        own = _groups(flags)
        own |= {flag: values for flag, values in new.items() if flag in cls.flags()}
        arguments = [word for flag, values in own.items() for word in (flag, *values)]
        try:
            settings, _ = parse(cls, arguments, f"suite {name}, cell {cell}: kvalign {verb}")
        except UserError as error:
            raise UserError(f"suite {name}, cell {cell}: {error}") from error
        cells.append(Cell(cell, settings.command_line(verb), first))
        known |= cls.flags()
    if useless := set(new) - known:
        raise UserError(f"suite {name} has no cell with {', '.join(sorted(useless))}")
    return cells


def is_finished(cell: Cell, out: Path) -> bool:
    """Whether the cell's document is there.

    Raises:
        UserError: a document of another command, or a damaged one.
    """
    path = _path(cell, out)
    if not path.exists():
        return False
    try:
        command = json.loads(path.read_text(encoding="utf-8"))["command"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it") from error
    if command != cell.command:
        raise UserError(f"{path} has another command's result: delete it or name another --out")
    return True


def run_cell(command: str, out: Path) -> str:
    """Run a cell's command in a process of its own: what it prints, a JSON document.

    Raises:
        RunError: it failed; its own message has been on stderr.
    """
    words = [word.replace("{out}", str(out)) for word in shlex.split(command)]
    words = [sys.executable, "-m", *words, "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        raise RunError(f"exit code {done.returncode} of {shlex.join(words[2:])}")
    return done.stdout


def keep(cell: Cell, out: Path, output: str) -> None:
    """Write what a cell printed to its place."""
    found: dict[str, Any] = json.loads(output)
    document: dict[str, Any] = {"result": found} if cell.is_preparation else found
    document["command"] = cell.command
    path = _path(cell, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document) + "\n")


def _path(cell: Cell, out: Path) -> Path:
    return out / ("prepared" if cell.is_preparation else ".") / f"{cell.name}.json"


def _groups(words: list[str]) -> dict[str, list[str]]:
    """Flags, each with the words after it."""
    groups: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            groups[word] = []
        elif not groups:
            raise UserError(f"flags begin with --, got {word!r}")
        else:
            groups[list(groups)[-1]].append(word)
    return groups
