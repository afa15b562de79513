"""Every field of every command: numbers that are none, beyond a bound or far from any that could be
meant, texts that are empty or of half a character. The settings refuse them, in one line that names
the flag, before anything is loaded or written.
"""

import dataclasses
import math
import typing
from pathlib import Path

import pytest

from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import COMMANDS, Command
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST, flag, without_none

KINDS = [
    (command, kind) for command in COMMANDS for kind in Command(command).all_settings() or [""]
]
FAR = (2**63, 10**30, -(10**30))
HALF = "an island \udcff of"  # as Python has a byte that is no UTF-8
EMPTY = "is empty|needs at least one value|must be a path"


def beyond(limits, kind):
    """The nearest values that the bounds of a field exclude."""
    step = 1 if kind is int else 1e-9
    most = MOST if kind is int and limits["at_most"] is None else limits["at_most"]
    sides = (limits["at_least"], -step), (limits["above"], 0), (most, step)
    for bound, by in sides:
        if bound is not None:
            yield math.nextafter(bound, by * math.inf) if kind is float and by else bound + by


def wrong_values(field, hint):
    """Values that a field does not take, and what is said of them."""
    (hint,) = typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else (hint,)
    if hint is int:
        values = ["ten", "1.5", "1e3", "inf", *FAR, *beyond(field.metadata, int)]
    elif hint is float:
        values = ["ten", "nan", "inf", "-inf", *beyond(field.metadata, float)]
    elif hint in (str, Path):
        halves = [(HALF, "is not UTF-8|must be")] if hint is str else []
        return [*halves, *([("", EMPTY)] if field.default != "" else [])]
    else:
        return []
    return [(str(value), "") for value in values]


def refusal(cls, words, command, capsys):
    """The line with which it is refused."""
    with pytest.raises((UserError, SystemExit)) as caught:
        parse(cls, words, f"kvalign {command}")
    is_of_argparse = isinstance(caught.value, SystemExit)
    return capsys.readouterr().err.strip() if is_of_argparse else str(caught.value)


@pytest.mark.parametrize(("command", "kind"), KINDS)
def test_what_no_field_takes_is_refused_by_its_name(command, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cls = Command(command).all_settings()[kind]
    hints = typing.get_type_hints(cls)
    needed = {f.name: f for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    for field in dataclasses.fields(cls):
        for value, message in wrong_values(field, without_none(hints[field.name])):
            others = [f for name, f in needed.items() if name != field.name]
            words = [
                word if f.metadata["positional"] else f"{flag(f.name)}={word}"
                for f, word in [*((f, example_of(f)) for f in others), (field, value)]
            ]
            said = refusal(cls, words, command, capsys)
            name = field.name.upper() if field.metadata["positional"] else flag(field.name)
            assert name in said and "\n" not in said, (words, said)
            assert any(part in said for part in message.split("|")), (words, said)
    assert not any(tmp_path.iterdir())


def example_of(field):
    """A value that a field takes."""
    return next(iter(field.metadata["choices"] or ["x"]))
