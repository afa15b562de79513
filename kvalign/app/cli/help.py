"""Layout of help: at most 80 columns, flags in groups, an example to copy."""

import argparse
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection

WIDTH = 80
_OTHER = "flags"
_GROUPS = {
    "results": "out csv keep plot page open",
    "text": "max_new_tokens do_sample temperature top_k top_p min_p repetition_penalty "
    "repetition_window no_repeat_ngram_size stop_at_end stop_strings seed",
    "cache": "cache_size cache_sizes num_sinks memory evict",
    "method": "method methods aligner policy reference",
    "expert": "num_evicted realign_every num_recent positions num_recalled recall_places "
    "recall_layers cache_dtype weights dtype device compile lookup",
}
OF_ALL = "with any command"
TITLES = (_OTHER, *_GROUPS, OF_ALL)
"""Groups of flags, in the order of help."""
_TITLE_OF = {name: title for title, names in _GROUPS.items() for name in names.split()}


def width() -> int:
    """Width of help in columns."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def titles_of(names: Collection[str]) -> dict[str, str]:
    """Group titles of a command's flags, by flag. An idea has the same title in all commands. A
    single flag has no group.
    """
    titles = {name: _TITLE_OF.get(name, _OTHER) for name in names}
    sizes = Counter(titles.values())
    return {name: title if sizes[title] > 1 else _OTHER for name, title in titles.items()}


def wrapped(text: str) -> str:
    """Paragraphs, each as wide as help is; lists keep their lines."""
    return "\n\n".join(textwrap.fill(part, width()) for part in text.split("\n\n"))


def example(command: str) -> str:
    """A command in lines for a shell, broken before flags."""
    lines: list[str] = []
    indent = "  "
    for part in re.split(r" (?=--)", command):
        if lines and len(lines[-1]) + len(part) + 3 <= width():
            lines[-1] += f" {part}"
        else:
            lines.append(indent + part)
            indent = "    "
    return " \\\n".join(lines)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of argparse, at most 80 columns wide."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26, width=width())
