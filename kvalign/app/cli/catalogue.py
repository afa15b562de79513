"""Commands, grouped by purpose, one line each. Listing them imports nothing heavy.

CONTRIBUTING.md describes the function of a command. `train` has a settings class for each kind of
aligner, its first argument.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from kvalign.eval.evaluations import ABOUT, EVALUATIONS
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import Settings

_FIRST_EVALUATION = "perplexity"
GROUPS = {
    "stream": {
        "generate": "stream text past the context length with any method",
        "chat": "hold one endless conversation in the terminal",
        "serve": "serve many endless streams behind the OpenAI API",
        "models": "list models that are here, and supported architectures",
        "doctor": "check what is installed here, and how to install the rest",
    },
    "train and compare": {
        "train": "train an aligner on text or on recorded caches",
        f"eval {_FIRST_EVALUATION}": ABOUT[_FIRST_EVALUATION],
        "eval run": "run a suite of evaluations; resumes an interrupted one",
        "report": "write a page, plots and tables of the results in a folder",
        "verify": "test a cache against the invariants of a streaming cache",
    },
    "now and then": {
        **{f"eval {name}": about for name, about in ABOUT.items() if name != _FIRST_EVALUATION},
        "lanes": "write a page that shows the cache step by step, for any method",
        "compile": "compile a model's step once: later starts are faster",
        "tune-memory": "measure how the memory of a model best gives back entries",
        "gen-data": "record KV caches before and after eviction",
        "tune": "sweep the networks' sizes and learning rate with Ray Tune",
        "judge": "judge networks by streams, and save a copy with those that help",
        "import-published": "make an aligner from the networks that the paper's authors publish",
        "pretrain": "train a small reference language model",
        "list": "list methods, policies, aligners and corpora",
    },
}
"""Commands of every day in the first two, which `kvalign --help` shows; the others are named."""
FAMILY = "eval"
"""First words of commands with two words."""
GIVEN = "--given"
"""In place of flags: settings are JSON on stdin. So a suite hands over those of a cell."""
_OF_TRAINING = ("gen-data", "import-published", "judge", "pretrain", "tune", "tune-memory")
_MODULES = dict.fromkeys(_OF_TRAINING, "train") | {
    "report": "evaluate",
    "compile": "models",
    "list": "models",
}
"""Modules of commands/ that have commands of other names."""
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}


@dataclass(frozen=True)
class Command:
    """Command with its name: `eval perplexity`; `train` with a kind."""

    name: str
    kind: str = ""

    @property
    def words(self) -> str:
        return f"{self.name} {self.kind}".rstrip()

    @property
    def has_json(self) -> bool:
        return self.name != "serve"

    @property
    def settings(self) -> type[Settings]:
        return self.all_settings()[self.kind]

    def all_settings(self) -> Mapping[str, type[Settings]]:
        """The settings classes by kind; a command of one kind has the key ""."""
        if self.name == "train":
            from kvalign.app.commands.train import all_settings

            return all_settings()
        settings, _ = self._found
        return {"": settings}

    def run(self, settings: Settings, as_json: bool) -> None:
        _, function = self._found
        document = function(settings, as_json)
        if as_json and document is not None:
            print(json.dumps(document))

    @property
    def _found(self) -> tuple[type[Settings], Callable[..., Any]]:
        first, _, name = self.name.partition(" ")
        if first == FAMILY and name in EVALUATIONS:
            from kvalign.app.commands.evaluate import evaluate

            return EVALUATIONS[name].settings, partial(evaluate, EVALUATIONS[name])
        member = self.name.replace(" ", "_").replace("-", "_")
        module = importlib.import_module(f"kvalign.app.commands.{_MODULES.get(self.name, member)}")
        function = getattr(module, member)
        return get_type_hints(function)["settings"], function


def find(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that these words begin with, and its flags. UserError names the nearest."""
    num_words = 2 if words[0] == FAMILY else 1
    name = " ".join(words[:num_words])
    if name not in COMMANDS:
        raise UserError(unknown("command", name, COMMANDS))
    args, kind = list(words[num_words:]), ""
    if name == "train":
        from kvalign.app.commands.train import kind_and_flags

        kind, args = kind_and_flags(args)
    return Command(name, kind), args
