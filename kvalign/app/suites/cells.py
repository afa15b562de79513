"""Cells from a suite's text: variables are filled in, flags overridden, commands checked."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvalign.app.cli import catalogue
from kvalign.app.cli.arguments import parse
from kvalign.app.listing import suites
from kvalign.eval.evaluations import EVALUATIONS, READERS
from kvalign.eval.evaluations.perplexity.imported import ImportLossesSettings
from kvalign.eval.report import OUT, Suite, parse_suite_text
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_text
from kvalign.foundation.settings import Settings

MAX_NAME = 100  # letters of a cell's name: it is a file's


@dataclass(frozen=True)
class Cell:
    """One command of a suite, with checked settings. In these {out} stands for the folder of the
    results, which may be moved.
    """

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
        """Name of the model that it loads, if it loads one; what only reads losses does not."""
        is_reader = isinstance(self.settings, ImportLossesSettings)
        return None if is_reader else getattr(self.settings, "model", None)

    def at(self, out: Path) -> "Cell":
        """The cell with a folder for {out}."""
        values = {name: _filled(value, str(out)) for name, value in vars(self.settings).items()}
        return replace(self, settings=replace(self.settings, **values))

    def as_json(self) -> str:
        """Its settings, as its process reads them."""
        return json.dumps(vars(self.settings), default=str)


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

    `override` are flags that replace those of the cells which have them. With another --model a
    cell loses the aligners that it names. `variables` are NAME=VALUE pairs that replace the
    suite's.
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
            settings = _overridden(command, flags, new, where)
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
    evaluations = {f"{catalogue.FAMILY} {name}" for name in (*EVALUATIONS, *READERS)}
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
    command: catalogue.Command, words: list[str], new: dict[str, list[str]], where: str
) -> Settings:
    """Checked settings of a command with these words, and with the new flags that it has."""
    own_flags, of_cell = command.settings.flags(), _flags(words)
    if new.get("--model", of_cell.get("--model")) != of_cell.get("--model"):
        of_cell.pop("--aligner", None)  # of another model
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
