"""Completion of the command line, with argcomplete. At TAB the shell runs `kvalign` with the line
in the environment, and gets the possible next words. docs/reference/command-line.md says how to
switch it on.

Commands and flags come from their `Settings`, names from the registries. Nothing heavy is imported.
"""

import argparse
import functools
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import Field
from pathlib import Path

import argcomplete
from argcomplete.completers import ChoicesCompleter, FilesCompleter

from kvalign import checkpoints
from kvalign.aligners.kinds import KINDS
from kvalign.app.cli.arguments import add_arguments
from kvalign.app.cli.catalogue import COMMANDS, Command
from kvalign.app.listing import suites
from kvalign.data_gen import corpora, corpus
from kvalign.methods.registry import AUTO, METHODS
from kvalign.models import fetched

Completer = Callable[..., Iterable[str]]


def complete(**options: typing.Any) -> None:
    """Answer the shell and end the process; `options` are `argcomplete.autocomplete`'s."""
    argcomplete.autocomplete(parser(), always_complete_options=False, **options)


def parser() -> argparse.ArgumentParser:
    """One parser of all commands, whose arguments know their possible values."""
    root = argparse.ArgumentParser("kvalign")
    groups = {"": root.add_subparsers()}
    for command, about in COMMANDS.items():
        group, _, name = command.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help="evaluate").add_subparsers()
        one = Command(command)
        of_one, kinds = groups[group].add_parser(name, help=about), one.all_settings()
        if "" not in kinds:
            of_one.add_argument("kind", nargs="?", choices=[*kinds])
        arguments = add_arguments(of_one, *kinds.values(), has_json=one.has_json)
        for action, field, hint in arguments.values():
            if hint is not bool:
                action.completer = _completer(field, hint)  # type: ignore[attr-defined]
    return root


def _completer(field: Field, hint: typing.Any) -> Completer:
    """Return the possible values of a field, by its name, which is the same in all commands."""
    names = field.metadata["choices"] or _names().get(field.name)
    if field.name == "method" and field.default == AUTO:
        names = (AUTO, *METHODS)
    if names:
        return functools.partial(_offer, names, typing.get_origin(hint) is tuple)
    return FilesCompleter() if hint is Path else ChoicesCompleter({})


@functools.cache
def _names() -> dict[str, tuple[str, ...]]:
    methods, texts = tuple(METHODS), _typed(corpora.NAMES)
    return {
        "model": (*checkpoints.MODELS, *fetched.MODELS),
        "aligner": checkpoints.ALIGNERS,
        "aligner_kinds": tuple(KINDS),
        "method": methods,
        "methods": methods,
        "reference": methods,
        "corpus": texts,
        "eval_corpus": texts,
        "prompts": _typed(corpus.PROMPTS),
        "suite": tuple(sorted(suites())),
    }


def _typed(specs: Iterable[str]) -> tuple[str, ...]:
    """Return the literal part of each specification: `hub:` of `hub:NAME[:CONFIG]`."""
    starts = (re.match("[^A-Z]*", spec) for spec in specs)
    return tuple(start[0] for start in starts if start and start[0])


def _offer(
    names: Iterable[str], may_be_several: bool, prefix: str, **_: typing.Any
) -> Iterable[str]:
    """Names, and files if no name begins so: a model may be either. Commas separate several."""
    before, comma, last = prefix.rpartition(",") if may_be_several else ("", "", prefix)
    start = re.match("(marked:)?(text:)?", last)[0]  # type: ignore[index]
    matches = [name for name in names if name.startswith(last)]
    if last == start != "" or not matches:
        matches = [start + path for path in FilesCompleter()(last.removeprefix(start))]
    return [before + comma + one for one in matches]
