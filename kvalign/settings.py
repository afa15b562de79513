"""Settings of a command: a frozen dataclass whose fields carry default, range and help text, and
the parser made of it.

A command line, a test and a sweep trial all make an instance and hand it to the same function.
"""

import argparse
import dataclasses
import inspect
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

S = TypeVar("S", bound="Settings")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    positional: bool = False,
) -> Any:
    """A dataclass field that the command line offers as `--name`; its range is checked when the
    settings are made.

    A field without a default must be given, a positional one without a flag. A tuple is given
    comma-separated or by repeating the flag.
    """
    limits = dict(
        at_least=at_least, at_most=at_most, above=above, choices=choices, positional=positional
    )
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class Settings:
    """Base of all commands' settings. Subclasses are `@dataclass(frozen=True, kw_only=True)`."""

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            name = field.name.upper() if field.metadata["positional"] else flag(field.name)
            if value == ():
                raise ValueError(f"{name} needs at least one value")
            for item in value if isinstance(value, tuple) else (value,):
                _check_range(name, item, field.metadata)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        values = {field.name: getattr(self, field.name) for field in fields_of(type(self))}
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}

    @classmethod
    def flags(cls) -> set[str]:
        """The command-line flags of the fields."""
        return {flag(field.name) for field in fields_of(cls) if not field.metadata["positional"]}

    def changed(self) -> dict[str, Any]:
        """The values that differ from the defaults, by field."""
        fields = [(field.name, field.default) for field in fields_of(type(self))]
        return {
            name: getattr(self, name) for name, default in fields if getattr(self, name) != default
        }

    def command_line(self, command: str, leave_out: tuple[str, ...] = ()) -> str:
        """The shell command that makes these settings, with what differs from the defaults."""
        words = ["kvalign", *command.split()]
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            if value == field.default or value is None or field.name in leave_out:
                continue
            name = flag(field.name)
            if field.metadata["positional"]:
                words.append(str(value))
            elif isinstance(value, bool):
                words.append(name if value else f"--no-{name[2:]}")
            else:
                items = value if isinstance(value, tuple) else (value,)
                words += [name, ",".join(map(str, items))]
        return shlex.join(words)


def parse(cls: type[S], argv: Sequence[str], prog: str) -> S:
    """Make settings of `cls` from command-line arguments; wrong use prints one line and exits with
    code 2.
    """
    about, _, example = inspect.cleandoc(cls.__doc__ or "").partition("Example:")
    parser = OneLineParser(
        prog=prog,
        description=about.strip(),
        epilog=example and "example:\n  " + example.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, cls)
    hints = typing.get_type_hints(cls)
    given = {
        name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None
    }
    for name, value in given.items():
        if typing.get_origin(without_none(hints[name])) is tuple:
            given[name] = tuple(item for part in value for item in part)
    return cls(**given)


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Settings]
) -> dict[str, argparse.Action]:
    """Make a parser take the fields of `cls`; returns its actions by field."""
    hints = typing.get_type_hints(cls)
    actions = {}
    for field in fields_of(cls):
        name = field.name if field.metadata["positional"] else flag(field.name)
        actions[field.name] = parser.add_argument(name, **_argument(field, hints[field.name]))
    return actions


def flag(name: str) -> str:
    """The command-line flag of a field: `cache_size` is `--cache-size`."""
    return "--" + name.replace("_", "-")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def fields_of(cls: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a `Settings` class, in the order of its flags."""
    return dataclasses.fields(cls)


def _argument(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """The keywords of `add_argument` for one field; absent flags stay None so that defaults live in
    the dataclass.
    """
    help_text = field.metadata["help"].replace("%", "%%")
    required = field.default is dataclasses.MISSING
    if not required and field.default not in (None, False):
        shown = field.default
        shown = ",".join(map(str, shown)) if isinstance(shown, tuple) else shown
        help_text += f" (default: {shown})"
    hint = without_none(hint)
    if hint is bool and field.default:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    if hint is bool:
        return {"action": "store_const", "const": True, "help": help_text}
    if field.metadata["positional"]:
        return {"type": hint, "help": help_text, "metavar": field.name.upper()}
    words: dict[str, Any] = {"help": help_text, "required": required}
    if field.metadata["choices"]:
        words["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return {"action": "append", "type": _comma_separated(item), **words}
    return {"type": hint, **words}


def without_none(hint: Any) -> Any:
    """T of `T | None`, any other hint as it is."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint


def _comma_separated(item: type) -> Any:
    def parse_items(text: str) -> list:
        return [item(part.strip()) for part in text.split(",") if part.strip()]

    parse_items.__name__ = f"comma-separated {item.__name__}"  # what argparse shows in its error
    return parse_items


def _check_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None:
        return
    low, high, above, choices = (limits[k] for k in ("at_least", "at_most", "above", "choices"))
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if low is not None and not value >= low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    if high is not None and not value <= high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
