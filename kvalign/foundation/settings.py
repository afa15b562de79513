"""Settings: a frozen dataclass whose fields have default, range and help text.

A command line, a notebook, a test and a sweep trial all make an instance, or give its fields as
keywords, and call the same function. Settings are defined beside the code that they configure, and
need no torch.
"""

import dataclasses
import functools
import inspect
import numbers
import operator
import os
import shlex
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvalign.foundation.errors import KeywordError, UserError, check_text
from kvalign.foundation.names import check_keywords, nearest

DEFAULT_MODEL = "gpt2-mini"

# What a number may be at most: far above any that is meant, far below what breaks a machine. What
# then does not fit into memory is said where it is allocated.
MOST = 10**12  # tokens, steps, entries: what may take long
MOST_ROWS = 2**20  # of a batch, of a vocabulary
MOST_ITEMS = 10**7  # lines, questions: what is made before there is work
MOST_SIZE = 2**16  # of a layer, of a chunk
MOST_PROCESSES = 1024
MOST_THREADS = max(64, 2 * (os.cpu_count() or 1))
MOST_SEED = 2**63 - 1
MOST_RATE = 1e3  # of learning, of decay

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("auto", *DTYPES, "int8", "int4")
Output = Literal["file", "folder"]

S = TypeVar("S", bound="Settings")
Result = TypeVar("Result")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    choices: Collection[str] | None = None,
    positional: bool = False,
    repeats: bool = False,
    writes: Output | None = None,
) -> Any:
    """Dataclass field that the command line offers as `--name`.

    Whole numbers are at most `MOST` unless the field says otherwise. A field without a default is
    required; a positional one has no flag. A tuple is given comma-separated or by repeating the
    flag. If it `repeats`, its values may contain commas. For an output path the field says whether
    it is a file or a folder.
    """
    limits = dict(at_least=at_least, at_most=at_most, above=above, choices=choices)
    more = dict(help=help, positional=positional, repeats=repeats, writes=writes)
    return dataclasses.field(default=default, metadata=limits | more)


def like(
    of: type, name: str, default: Any = None, *, more: str | None = None, **limits: Any
) -> Any:
    """Option with the help, the range and the choices of a field of another class of options.

    `more` follows the help; None: the default there, if it has one. `limits` take the place of its
    own.
    """
    (known,) = (field for field in fields(of) if field.name == name)
    if more is None:
        usual = known.default
        shown = f"{usual:g}" if isinstance(usual, float) else usual
        more = "" if usual in (None, dataclasses.MISSING) else f" (default: {shown})"
    changed = {**limits, "help": known.metadata["help"] + more}
    return dataclasses.field(default=default, metadata={**known.metadata, **changed})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings. Subclasses are `@dataclass(frozen=True, kw_only=True)`.

    A path may be given as text, several values as a list, and a single one without a list.

    Raises:
        UserError: a value of another type or out of range; the message names the command line's
            flag.
    """

    def __post_init__(self) -> None:
        check_fields(self, flag)

    def as_dict(self) -> dict[str, Any]:
        return {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}

    @classmethod
    def flags(cls) -> set[str]:
        return {flag(field.name) for field in fields(cls) if not field.metadata["positional"]}

    def changed(self) -> dict[str, Any]:
        """The values that differ from the defaults, by field."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    def command_line(self, command: str, leave_out: tuple[str, ...] = ()) -> str:
        """Shell command with these settings, without the defaults."""
        words = ["kvalign", *command.split()]
        repeated = {field.name for field in fields(self) if field.metadata["repeats"]}
        for name, value in self.changed().items():
            if value is None or name in leave_out:
                continue
            if flag(name) not in self.flags():  # positional
                words.append(str(value))
            elif isinstance(value, bool):
                words.append(flag(name if value else f"no_{name}"))
            else:
                items = [str(item) for item in (value if isinstance(value, tuple) else (value,))]
                for one in items if name in repeated else [",".join(items)]:
                    words += [flag(name), one]
        return shlex.join(words)


_hints = functools.cache(typing.get_type_hints)  # which evaluates them anew at each call


def check_fields(values: Any, name_of: Callable[[str], str] = str) -> None:
    """Check the `option`s of a frozen dataclass, in place; UserError with a field, by `name_of`."""
    hints: Any = _hints(values.__class__)
    for field in fields(values):
        value, hint = getattr(values, field.name), without_none(hints[field.name])
        if value is None and hint is not hints[field.name]:
            continue
        name = field.name.upper() if field.metadata["positional"] else name_of(field.name)
        if typing.get_origin(hint) is not tuple:
            value = _check_value(name, value, hint, field)
        else:
            items = value if isinstance(value, tuple | list | set | range) else (value,)
            if not items or value is None:
                raise UserError(f"{name} needs at least one value")
            kind = typing.get_args(hint)[0]
            value = tuple(_check_value(name, item, kind, field) for item in items)
        object.__setattr__(values, field.name, value)


def flag(name: str) -> str:
    """The command-line flag of a field: `cache_size` is `--cache-size`."""
    return "--" + name.replace("_", "-")


def without_none(hint: Any) -> Any:
    """T of `T | None`; any other hint unchanged."""
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # of a Literal, the other
    return functools.reduce(operator.or_, arms) if is_union else hint


def _has_bytes(x: str | Path) -> bool:
    try:
        return b"\0" not in os.fsencode(x)
    except UnicodeEncodeError:
        return False


_LARGEST: Any = sys.float_info.max  # a whole number may be above it
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda x: isinstance(x, bool)),
    int: ("a whole number", lambda x: isinstance(x, numbers.Integral)),
    float: ("a finite number", lambda x: isinstance(x, numbers.Real) and abs(x) <= _LARGEST),
    str: ("a text", lambda x: isinstance(x, str)),
    Path: ("a path", lambda x: isinstance(x, str | Path) and x != "" and _has_bytes(x)),
}


def typed(name: str, value: Any, hint: Any) -> Any:
    """Value for an int, a float, a bool, a text or a path, checked: True is not a number, a whole
    number is a valid float, text a valid path. NumPy's numbers become Python's. Other types are not
    checked.

    Raises:
        UserError: it is of another type, not finite, or a whole number beyond 63 bits; the message
            begins with `name`.
    """
    if hint not in _KINDS:
        return value
    needed, holds = _KINDS[hint]
    if not holds(value) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{name} must be {needed}, got {value!r:.80}")
    if hint is int and abs(int(value)) >= 2**63:
        raise UserError(f"{name} must be below 2^63, got {value!r:.80}")
    return value if isinstance(value, int | float | str) and hint is not Path else hint(value)


def expect(name: str, value: object, kind: Any, needed: str) -> None:
    """Raise UserError, which begins with `name`, unless a value is of a kind."""
    if not isinstance(value, kind):
        raise UserError(f"{name} must be {needed}, got {type(value).__name__}")


_COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}


def _check_value(name: str, value: Any, kind: Any, field: dataclasses.Field) -> Any:
    """One value of a field, of its kind and in its range."""
    limits = field.metadata
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is str and (is_number or isinstance(value, Path)):
        value = str(value)
    if isinstance(value, str) and not value and field.default != "":
        raise UserError(f"{name} is empty: give a value, or leave it out")
    value = typed(name, value, kind)
    if isinstance(value, str):  # a path may be of any bytes
        check_text(value, name)
    if (choices := limits["choices"]) and value not in choices:
        near = nearest(str(value), choices)
        hint = f": did you mean {near}?" if near else ""
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")
    most = MOST if limits["at_most"] is None and isinstance(value, int) else limits["at_most"]
    for limit, holds in _COMPARISONS.items():
        bound = most if limit == "at_most" else limits[limit]
        if bound is not None and not holds(value, bound):
            raise UserError(f"{name} must be {limit.replace('_', ' ')} {bound}, got {value}")
    return value


def check_outputs(settings: Settings) -> None:
    """Raise UserError for an output path in settings that cannot be written, before any work."""
    for field in fields(settings):
        path, output = getattr(settings, field.name), field.metadata["writes"]
        if output and path is not None:
            check_output(path, output, flag(field.name))


def check_output(path: Path, output: Output, name: str = "--out") -> None:
    """Raise UserError if a file or a folder cannot be written; folders above it need not exist."""
    if output == "file" and path.exists() and not path.is_file():  # it would be replaced
        if path.is_dir():
            raise UserError(f"{name} {path} is a folder: name a file in it")
        raise UserError(f"{name} {path} cannot be written: it is a device or a pipe, not a file")
    folder = (path if output == "folder" else path.parent).absolute()
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not there.is_dir():
        raise UserError(f"{name} {path} cannot be written: {there} is a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = f"{there} is not writable for you ({error.strerror})"
        raise UserError(f"{name} {path} cannot be written: {reason}") from None


def keywords_of(cls: type[S]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator for a function of settings: it can also be called with the settings' fields as
    keywords.

    `function(settings, *, more=...)` becomes `function(**fields, more=...)`; its signature and its
    docstring list the fields. A path may be given as text, a tuple as a list.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        of_function = inspect.signature(function).parameters.values()
        more_parameters = [p for p in of_function if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(function)
        def call(settings: S | None = None, /, **keywords: Any) -> Result:
            more = {p.name: keywords.pop(p.name) for p in more_parameters if p.name in keywords}
            if settings is None:
                check_keywords(call, keywords)
                needed = [p.name for p in parameters if p.default is p.empty]
                if missing := [name for name in needed if name not in keywords]:
                    raise KeywordError(f"{function.__name__}() needs {missing[0]}=...")
                settings = cls(**keywords)
                check_outputs(settings)
            elif keywords or not isinstance(settings, cls):
                words = ", ".join(keywords) or repr(settings)
                raise TypeError(f"give {cls.__name__} or keywords, not both, got {words:.80}")
            return function(settings, **more)

        hints, of_class = typing.get_type_hints(cls), inspect.signature(cls).parameters.values()
        parameters = [p.replace(annotation=hints[p.name]) for p in of_class]
        call.settings_type = cls  # type: ignore[attr-defined]
        call.__signature__ = inspect.Signature([*parameters, *more_parameters])  # type: ignore[attr-defined]
        lines = [f"    {field.name}: {field.metadata['help']}" for field in fields(cls)]
        about = inspect.cleandoc(function.__doc__ or "")
        call.__doc__ = "\n".join([about, "", "Keywords:", *lines])
        return call

    return decorate


def settings_of(function: Callable[..., Any]) -> Any:
    return function.settings_type  # type: ignore[attr-defined]


OF_WEIGHTS = (
    "type of the weights; int8, int4: packed, on a CPU or CUDA; auto: int4 if the file has the "
    "weights of all products in 4 bits, else float32 on a CPU and the file's own on a GPU"
)
DEVICE = "cpu, cuda, mps, ...; auto: cuda if there is one with room for the model, else cpu"


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    model: str = option(DEFAULT_MODEL, help="shipped name, hub id or folder of a causal LM")
    weights: str = option("float32", help=OF_WEIGHTS, choices=WEIGHTS)
    device: str = option("auto", help=DEVICE)


NUM_SINKS = (
    "first entries that are never evicted (default: 4; window, recompute: 0; kvalign: by aligner)"
)
