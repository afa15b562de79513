"""The command line: `kvalign COMMAND [--flags]`; `catalogue.py` has the commands.

Results go to stdout, progress and timings to stderr. Exit codes: 0 done; 1 failed, by a fault of
the machine or of KV-Align; 2 wrong use, which the user can correct; 130 stopped by Ctrl-C or
`kill`. An error is one line. Help is fast: each command imports its heavy modules when it runs.
"""

import gc
import json
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import kvalign
from kvalign.app.cli import catalogue
from kvalign.app.cli.arguments import columns, parse
from kvalign.app.cli.catalogue import COMMANDS, GROUPS
from kvalign.app.cli.next_steps import say_stopped
from kvalign.foundation import progress
from kvalign.foundation.errors import Killed, RunError, UserError, escape_controls, is_of_a_path
from kvalign.foundation.settings import check_outputs

_HELP = ("-h", "--help")
_ALL = "all"  # behind them: every command with what it does
# Characters of a message: a value that came may be of any length.
_LONGEST = 1000
# What torch says on a CPU, in place of MemoryError.
_ALLOCATOR = r"DefaultCPUAllocator: .*?tried to allocate (\d+) bytes"
# What tokenizers says of the machine, in an Exception.
_OF_RUST = re.compile(r"\(os error \d+\)$")
_USAGE = """usage: kvalign COMMAND [--help] [flags]

Endless generation with a KV cache of fixed size, realigned after each eviction.

{commands}

with any command: --help (its flags, an example), --debug (errors' tracebacks)

example:
  kvalign generate --cache-size 64 --prompt "The history of the island"
"""


def _on_kill(*_: object) -> NoReturn:
    raise Killed


def main(argv: Sequence[str] | None = None) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may be typed next
        from kvalign.app.cli.completion import complete

        complete()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if args[:1] == ["--debug"]:
        del args[0]
    _open_streams()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_kill)  # as Ctrl-C, with a line on what is kept
    gc.set_threshold(100_000)  # to import torch and transformers takes a quarter less
    os.environ["MPLBACKEND"] = "agg"  # plots are files here: no window, whatever is set for one
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[progress.LogHandler()])
    name, flags_of = "", set[str]()
    try:
        if (code := _help(args)) is not None:
            return code
        command, flags = catalogue.find(args)
        name, cls = command.words, command.settings
        flags_of = cls.flags()
        if flags == [catalogue.GIVEN]:
            settings, as_json = cls(**json.load(sys.stdin)), True
        else:
            settings, as_json = parse(cls, flags, f"kvalign {name}", has_json=command.has_json)
        check_outputs(settings)
        command.run(settings, as_json)
    except SystemExit as end:  # argparse's --help and errors, or a command that says how it ended
        return int(end.code or 0)
    except KeyboardInterrupt as stop:
        say_stopped(name, stop, args, flags_of)
        return 130
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, message = explain(error)
        message = escape_controls(" ".join(_in_flags(message, flags_of).split()))
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        print(f"kvalign {name}".strip() + f": error: {message}", file=sys.stderr)
        return code
    return 0


def _open_streams() -> None:
    """Open streams that the shell has closed (`2>&-`): Python prints to stdout without stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _help(args: Sequence[str]) -> int | None:
    """Print help that belongs to no single command, and return the exit code, else None."""
    if not args or args[0] in _HELP:
        is_whole = args[1:] == [_ALL]
        print(usage(is_whole), end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args == [catalogue.FAMILY] or args in [[catalogue.FAMILY, word] for word in _HELP]:
        family = f"{catalogue.FAMILY} "
        lines = _lines({name: COMMANDS[name] for name in COMMANDS if name.startswith(family)})
        head = f"usage: kvalign {family}COMMAND [--help] [flags]\n"
        print(head, *lines, sep="\n", file=sys.stdout if args[1:] else sys.stderr)
        return 0 if args[1:] else 2
    if args[0] == "--version":
        print("kvalign", kvalign.__version__)
        return 0
    return None


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error that ended a command."""
    if isinstance(error, RunError):
        return 1, str(error)
    if isinstance(error, UserError) or is_of_a_path(error):
        return 2, str(error)
    if isinstance(error, OSError) or _OF_RUST.search(str(error)):  # the machine's, as a full disk
        return 1, f"{error}; what was finished is kept"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return 1, f"not enough memory: {error}".removesuffix(": ")
    if isinstance(error, RuntimeError) and (match := re.search(_ALLOCATOR, str(error))):
        return 1, f"not enough memory for {match[1]} bytes at once: use smaller sizes"
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "kvalign"):
        from kvalign.app.commands.doctor import how_to_install

        return 2, f"it needs {package}: {how_to_install(package)}"
    fault = f"{type(error).__name__}: {error}".removesuffix(": ")
    return 1, f"an error in KV-Align ({fault}): please open an issue with the output of --debug"


def _in_flags(message: str, flags: Collection[str]) -> str:
    """Message whose first setting has its Python name, with flags instead."""
    by_name = {flag[2:].replace("-", "_"): flag for flag in flags if "-" in flag[2:]}
    by_name = {name.removesuffix("s"): by_name[name] for name in by_name} | by_name  # --cache-sizes
    if message.partition(" ")[0].rstrip(",") not in {*by_name, *(flag[2:] for flag in flags)}:
        return message
    return re.sub(r"\b\w+_\w+\b", lambda word: by_name.get(word[0], word[0]), message)


def usage(is_whole: bool = False) -> str:
    """Return the text of `kvalign --help`: the commands of every day, or all, by purpose."""
    width = max(map(len, COMMANDS))
    if is_whole:
        groups = ["\n".join([f"{title}:", *_lines(of, width)]) for title, of in GROUPS.items()]
        return _USAGE.format(commands="\n\n".join(groups))
    *first, (_, others) = GROUPS.items()
    lines = [line for _, group in first for line in _lines(group, width)]
    more = f"more (kvalign --help {_ALL}): {', '.join(others)}"
    return _USAGE.format(
        commands="\n".join([*lines, "", textwrap.fill(more, columns(), break_on_hyphens=False)])
    )


def _lines(commands: Mapping[str, str], width: int = 0) -> list[str]:
    """Line for each command, names in a column as wide as the longest, or `width`."""
    width = max(width, *map(len, commands))
    return [
        textwrap.fill(f"  {name:{width}}  {about}", columns(), subsequent_indent=" " * (width + 4))
        for name, about in commands.items()
    ]
