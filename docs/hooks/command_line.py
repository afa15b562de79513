"""Reference of the command line: every command's text, example and flags, from its settings."""

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

from kvalign.app.cli.catalogue import COMMANDS, Command
from kvalign.foundation.settings import Settings, flag, without_none

_TAKES = {int: "whole number", float: "number", str: "text", Path: "path"}


def reference() -> str:
    """Section for each command and kind, in the order of `kvalign --help`."""
    return "\n".join(
        _section(f"{command} {kind}".strip(), settings)
        for command in COMMANDS
        for kind, settings in Command(command).all_settings().items()
    )


def _section(command: str, settings: type[Settings]) -> str:
    about, _, example = inspect.cleandoc(settings.__doc__ or "").partition("Example:")
    hints = typing.get_type_hints(settings)
    lines = [
        f"## `kvalign {command}`",
        "",
        about.strip(),
        "",
        "```bash",
        example.strip(),
        "```",
        "",
        "| flag | takes | default | |",
        "|---|---|---|---|",
    ]
    lines += [_row(field, hints[field.name], settings) for field in dataclasses.fields(settings)]
    return "\n".join([*lines, ""])


def _row(field: dataclasses.Field, hint: Any, settings: type[Settings]) -> str:
    name = field.name.upper() if field.metadata["positional"] else flag(field.name)
    cells = [
        f"`{name}`",
        _takes(hint, field.metadata, field.default is not False),
        _default(field),
        field.metadata["help"],
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(hint: Any, metadata: Any, has_no: bool) -> str:
    hint = without_none(hint)
    if hint is bool:
        return "nothing; `--no-` turns it off" if has_no else "nothing"
    if metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in metadata["choices"])
    if typing.get_origin(hint) is tuple:
        how = "each with the flag" if metadata["repeats"] else "by commas"
        return f"{_TAKES[typing.get_args(hint)[0]]}s, {how}"
    return _TAKES[hint]


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is None or field.default == "":
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    items = field.default if isinstance(field.default, tuple) else (field.default,)
    return f"`{','.join(map(str, items))}`"
