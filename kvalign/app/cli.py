"""The command line: `kvalign VERB [--flags]`. A command is one module of `kvalign.app.commands` and
one line here, in the group of what it is for.

A command module declares a `Settings` class (its flags) and `run(settings)`; it imports what is
heavy inside `run`, so that help answers at once. Results go to stdout, progress and timings to
stderr. Exit code 0: done; 1: failed; 2: wrong use, said in one line.
"""

import errno
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Sequence

from kvalign.settings import Settings, parse

GROUPS = {
    "stream": {
        "generate": "stream text past the context length with any method",
        "chat": "hold one endless conversation in the terminal",
        "demo-ui": "watch methods write side by side, on a page served here",
        "lanes": "a page that shows the cache step by step, for any method",
    },
    "train": {
        "gen-data": "record KV caches before and after eviction",
        "train": "train an aligner on text or on recorded caches",
        "tune": "sweep the networks' sizes and learning rate with Ray Tune",
        "import-published": "make an aligner of the networks that the paper's authors publish",
        "pretrain": "train a small reference language model from scratch",
    },
    "evaluate": {
        "eval perplexity": "compare methods on perplexity and time",
        "eval latency": "time per token of all methods, taking turns",
        "eval readability": "let methods write, and judge what they wrote",
        "eval streameval": "ask for values registered some lines back in an endless stream",
        "eval chat": "many conversations through one stream, each answer judged",
        "eval run": "run a suite of evaluations into a folder; takes up where it was interrupted",
        "report": "a page, plots and tables of the results in a folder",
    },
    "look around": {
        "doctor": "what is installed, reachable and at hand here, and what to do about the rest",
        "models": "models at hand, and the architectures that are supported",
        "methods": "ways to stream",
        "aligners": "aligners at hand: for which model, of which kind, trained on what",
        "corpora": "texts to train and evaluate on",
        "completion": "a script for the shell that completes commands, flags and names",
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}

_HELP = ("-h", "--help")
_USAGE = """usage: kvalign COMMAND [--help] [flags]

KV-Align: endless generation with a KV cache of fixed size, realigned after each eviction.

{commands}
example:
  kvalign generate --model gpt2-mini --cache-size 64 --prompt "The history of the island"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may be typed next
        from kvalign.app.completion import complete

        complete()
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in _HELP or args in [["eval", word] for word in _HELP]:
        print(usage(), end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print("kvalign", version("kvalign"))
        return 0
    name = " ".join(args[:2]) if args[0] == "eval" else args[0]
    if name not in COMMANDS:
        return _wrong_use(_unknown(name))
    module = importlib.import_module(module_name(name))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        module.run(parse(settings_class(module), args[len(name.split()) :], f"kvalign {name}"))
    except (
        ValueError,
        FileNotFoundError,
        FileExistsError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        return _wrong_use(str(error), name)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has left
            sys.stderr.close()
            return 0
        refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        _wrong_use(f"{error}; what was finished before is kept", name)
        return 2 if refused else 1
    except ModuleNotFoundError as error:
        if (error.name or "kvalign").startswith("kvalign"):
            raise
        from kvalign.app.requirements import how_to_install

        needed = (error.name or "").partition(".")[0]
        return _wrong_use(f"it needs {needed}: {how_to_install(needed)}", name)
    except SystemExit as end:  # argparse's --help and errors
        return int(end.code or 0)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def usage() -> str:
    """What `kvalign --help` prints: the commands by what they are for."""
    width = max(map(len, COMMANDS)) + 2
    lines = []
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:{width}}{about}" for name, about in group.items()), ""]
    return _USAGE.format(commands="\n".join(lines))


def module_name(command: str) -> str:
    """Where a command lives: `eval perplexity` is `kvalign.app.commands.eval_perplexity`."""
    return "kvalign.app.commands." + command.replace(" ", "_").replace("-", "_")


def settings_class(module) -> type[Settings]:
    """The `Settings` class that a command module declares."""
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Settings)
        and value.__module__ == module.__name__
    ]
    assert len(own) == 1, f"{module.__name__} must declare one Settings class"
    return own[0]


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown command {name!r}{hint} (commands: {', '.join(COMMANDS)})"


def _wrong_use(message: str, command: str = "") -> int:
    line = " ".join(message.split())
    print(f"kvalign {command}".strip() + f": error: {line}", file=sys.stderr)
    return 2
