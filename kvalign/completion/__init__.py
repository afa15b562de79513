"""Completion of the command line in bash, zsh and fish: a script that holds every command, flag and
name, so that TAB starts no Python.

Flags are read from the commands' `Settings`, names from the registries. (The package `shtab` makes
scripts of argparse parsers, but none for fish, and completes no lists as in `window,kvalign`.)
"""

import dataclasses
import importlib
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvalign import checkpoints, listing
from kvalign.cli import COMMANDS, module_name, settings_class
from kvalign.settings import fields_of, flag, without_none

Takes = Literal["nothing", "value", "file"]


@dataclass(frozen=True)
class Argument:
    """A flag, or what a command takes without one.

    Attributes:
        name: `--cache-size`; of what has no flag `SUITE`.
        takes: what comes after a flag: nothing, a value, or also a file or folder.
        values: names to offer; empty for a number, a text or a file.
        is_list: several values may be given, comma-separated.
    """

    name: str
    about: str
    takes: Takes
    values: tuple[str, ...] = ()
    is_list: bool = False


def script(shell: str) -> str:
    """The completion script for a shell: a module of this package."""
    module = importlib.import_module(f"kvalign.completion.{shell}")
    return module.script({command: arguments(command) for command in COMMANDS})


def steps() -> dict[str, dict[str, str]]:
    """What may follow the words typed so far until they are a command, each with what it is: by
    `` the first words, by `eval` the evaluations.
    """
    found: dict[str, dict[str, str]] = {"": {}}
    for command, about in COMMANDS.items():
        first, _, second = command.partition(" ")
        if second:
            found.setdefault(first, {})[second] = about
        found[""].setdefault(first, about)
    for first in filter(None, found):
        found[""][first] = ", ".join(found[first])
    return found


def arguments(command: str) -> list[Argument]:
    """Every argument of a command."""
    cls = settings_class(importlib.import_module(module_name(command)))
    hints = typing.get_type_hints(cls)
    found = [Argument("--help", "show what the command does and takes", "nothing")]
    for field in fields_of(cls):
        found += _arguments(field, without_none(hints[field.name]))
    return found


def _arguments(field: dataclasses.Field, hint: Any) -> Iterator[Argument]:
    about = field.metadata["help"]
    name = field.name.upper() if field.metadata["positional"] else flag(field.name)
    if hint is bool:
        yield Argument(name, about, "nothing")
        if field.default is True:
            yield Argument(f"--no-{name[2:]}", f"not: {about}", "nothing")
        return
    is_list = typing.get_origin(hint) is tuple
    values = field.metadata["choices"] or ()
    takes: Takes = "file" if hint is Path else "value"
    if field.name in _names():
        takes, values = _names()[field.name]
    yield Argument(name, about, takes, values, is_list)


def _names() -> dict[str, tuple[Takes, tuple[str, ...]]]:
    """Of fields, which have one name for one idea in all commands: what they may be given, and
    whether it may be a file or folder, too.
    """
    from kvalign.commands.train import TrainSettings
    from kvalign.data_gen import corpora, prompts

    methods: tuple[Takes, tuple[str, ...]] = ("value", listing.method_names())
    texts: tuple[Takes, tuple[str, ...]] = ("file", _typed(corpora.NAMES))
    kinds = {field.name: field.metadata["choices"] for field in fields_of(TrainSettings)}
    return {
        "model": ("file", checkpoints.MODELS),
        "aligner": ("file", checkpoints.ALIGNERS),
        "aligner_kinds": ("value", kinds["aligner_kind"]),
        "method": methods,
        "methods": methods,
        "reference": methods,
        "corpus": texts,
        "eval_corpus": texts,
        "prompts": ("file", _typed(prompts.NAMES)),
        "suite": ("file", tuple(sorted(listing.suites()))),
    }


def _typed(specs: Iterable[str]) -> tuple[str, ...]:
    """What of specifications is typed as it stands: `hub:` of `hub:NAME[:CONFIG]`."""
    starts = (re.match("[^A-Z]*", spec) for spec in specs)
    return tuple(start[0] for start in starts if start and start[0])
