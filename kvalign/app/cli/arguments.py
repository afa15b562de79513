"""Arguments of a command: a parser made from its settings, and its help of at most 80 columns."""

import argparse
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import typing
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import nearest
from kvalign.foundation.settings import Settings, flag, without_none

WIDTH = 80
_OTHER = "flags"
_GROUPS = {
    "results": "out csv keep plot page open",
    "text": "max_new_tokens do_sample temperature top_k top_p min_p repetition_penalty "
    "repetition_window no_repeat_ngram_size stop_at_end stop_strings seed",
    "cache": "cache_size cache_sizes num_sinks memory evict",
    "method": "method methods aligner policy reference",
    "expert": "num_evicted realign_every num_recent positions num_recalled recall_places "
    "recall_layers cache_dtype weights device compile lookup",
}
_OF_ALL = "with any command"
_FILE = "--settings"
_TITLES = (_OTHER, *_GROUPS, _OF_ALL)
"""Groups of flags, in the order of help."""
_TITLE_OF = {name: title for title, names in _GROUPS.items() for name in names.split()}

LONGEST_CHOICES = 64  # characters that fit behind a flag

S = TypeVar("S", bound=Settings)


def parse(cls: type[S], argv: Sequence[str], prog: str, *, has_json: bool = True) -> tuple[S, bool]:
    """The settings from the words after a command, and whether `--json` was given.

    Wrong use prints one line and exits with code 2. The docstring of the settings is the help.
    `--settings FILE` gives values that flags replace: fields in YAML, or the `settings` in a
    result's JSON.
    """
    help_text, _, example = inspect.cleandoc(cls.__doc__ or "").partition("Example:")
    commands = [_example(line.strip()) for line in example.strip().splitlines()]
    positional = [x for x in dataclasses.fields(cls) if x.metadata["positional"]]
    named = [x.name.upper() if x.default is MISSING else f"[{x.name.upper()}]" for x in positional]
    parser = OneLineParser(
        prog=prog,
        usage=" ".join([prog, *named, "[flags]"]),
        description=_wrapped(help_text.strip()),
        epilog="\n".join(["example:", *commands]) if commands else None,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=26, width=columns()
        ),
        allow_abbrev=False,
        add_help=False,
    )
    fields = add_arguments(parser, cls, has_json=has_json)
    arguments = vars(parser.parse_args(argv))
    given = {name: arguments[name] for name in fields if arguments[name] is not None}
    path = arguments[_FILE[2:]]
    values = given if path is None else _of_file(Path(path), prog, fields) | given
    lacking = [name for name, (_, x, _) in fields.items() if x.default is MISSING]
    if missing := [fields[name][0] for name in lacking if name not in values]:
        names = ", ".join(str([*x.option_strings, x.metavar][0]) for x in missing)
        parser.error(f"the following arguments are required: {names}")
    return cls(**values), bool(arguments.get("json"))


def _of_file(path: Path, prog: str, fields: Collection[str]) -> dict[str, Any]:
    """The settings in a file; UserError if there are others than the fields of this command."""
    import yaml

    from kvalign.foundation.files import read_text

    try:
        values = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if isinstance(values, dict) and isinstance(values.get("settings"), dict):
        of_results = _GROUPS["results"].split()  # where that one was written
        values = {k: v for k, v in values["settings"].items() if k not in of_results}
    if not isinstance(values, dict):
        raise UserError(f"{path} must have settings, name: value, got {values!r:.80}")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    if others := sorted(values.keys() - set(fields)):
        raise UserError(f"{path} has settings that {prog} has not: {', '.join(others)}")
    return {name: value for name, value in values.items() if value is not None}


def add_arguments(
    parser: argparse.ArgumentParser, *classes: type[Settings], has_json: bool = True
) -> dict[str, tuple[argparse.Action, dataclasses.Field, Any]]:
    """Add the fields of settings, `--json` and `--debug` to a parser.

    Returns:
        for each field: its action, itself, and its type without `| None`.
    """
    arguments, groups = {}, {title: parser.add_argument_group(title) for title in _TITLES}
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    sizes = Counter(_TITLE_OF.get(name, _OTHER) for name in names)
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name not in arguments:
                hint = without_none(hints[field.name])
                name = field.name if field.metadata["positional"] else flag(field.name)
                title = _TITLE_OF.get(field.name, _OTHER)
                group = groups[title if sizes[title] > 1 else _OTHER]  # none of a single flag
                action = group.add_argument(name, **_argument(field, hint))
                arguments[field.name] = (action, field, hint)
    of_all = groups[_OF_ALL]
    if not parser.add_help:
        of_all.add_argument("-h", "--help", action="help", help="this")
    about = "YAML file of flags without --, or JSON of a result, whose settings to take"
    of_all.add_argument(_FILE, metavar="FILE", help=about)
    if has_json:
        about = "print one JSON document instead of text"
        of_all.add_argument("--json", action="store_const", const=True, help=about)
    about = "show the whole traceback of an error"
    of_all.add_argument("--debug", action="store_const", const=True, help=about)
    return arguments


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: .*?--([\w-]+)", message)
        known = [name[2:].replace("-", "_") for name in self._option_string_actions]
        if unknown and (near := nearest(unknown[1].replace("-", "_"), known)):
            message += f"; did you mean {flag(near)}?"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _argument(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Keywords of `add_argument` for a field. None is required, as a file may give it; absent ones
    are None: the dataclass has defaults.
    """
    help_text, default = field.metadata["help"].replace("%", "%%"), field.default
    if default not in (MISSING, None, False, ""):
        default = ",".join(map(str, default)) if isinstance(default, tuple) else default
        default = "on" if default is True else default
        help_text += f" (default: {default})"
    words: dict[str, Any] = {"help": help_text}
    if hint is bool and field.default is not False:
        return {"action": argparse.BooleanOptionalAction, **words}
    if hint is bool:
        return {"action": "store_const", "const": True, **words}
    words["type"] = str if hint is Path else hint  # Path("") would be this folder
    if field.metadata["positional"]:
        return {"metavar": field.name.upper(), "nargs": "?", **words}
    if choices := field.metadata["choices"]:
        named = "{" + ",".join(choices) + "}"
        if len(named) <= LONGEST_CHOICES:
            words["metavar"] = named
        else:
            words["help"] += f": {', '.join(choices)}"
    if field.metadata["repeats"]:
        words |= {"action": "append", "type": typing.get_args(hint)[0]}
    elif typing.get_origin(hint) is tuple:
        words |= {"action": "extend", "type": _comma_separated(typing.get_args(hint)[0])}
    return words


def _comma_separated(item: type) -> Any:
    def parse_items(text: str) -> list:
        return [item(part.strip()) for part in text.split(",") if part.strip()]

    parse_items.__name__ = f"comma-separated {item.__name__}"  # what argparse shows in its error
    return parse_items


def columns() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _wrapped(text: str) -> str:
    """Paragraphs, each as wide as help is; lists keep their lines."""
    return "\n\n".join(textwrap.fill(part, columns()) for part in text.split("\n\n"))


def _example(command: str) -> str:
    """A command in lines for a shell, broken before flags."""
    lines: list[str] = []
    for part in re.split(r" (?=--)", command):
        if lines and len(lines[-1]) + len(part) + 3 <= columns():
            lines[-1] += f" {part}"
        else:
            lines.append(("    " if lines else "  ") + part)
    return " \\\n".join(lines)
