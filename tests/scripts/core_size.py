"""Size of the core: what a decode step calls, and what one has to read to follow it.

    python tests/scripts/core_size.py

The step is that of `kvalign generate`, in a full cache, uncompiled. The lines are those of all our
modules that `import kvalign` loads, one input fed to `streaming-llm` and to `kvalign`, and a few
tokens of the loop. Models, foundation and what a stream works without are counted apart.
A circle is some of these modules that import each other, also inside functions or for types alone.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from kvalign.app.cli.arguments import parse
from kvalign.app.commands.generate import GenerateSettings, marked
from kvalign.app.sessions.stream_settings import pieces_of
from kvalign.foundation.settings import DEFAULT_MODEL, Settings, option

APART = ("memory", "steppers", "streaming.memory_file")
"""Modules, or packages with all their modules, that the core works without."""
OUTSIDE = ("models", "foundation")
"""Packages that are not the core: what we know of models, and what knows nothing of them."""
LOADING = """
import sys
import torch
import kvalign
for name in ("gpt2-mini", "llama-mini"):
    model = kvalign.load_model(name, dtype="float32").model
    for method in ("streaming-llm", "kvalign"):
        made = kvalign.make_method(method, model, cache_size=8, warn=False)
        made.feed(torch.tensor([[5, 6, 7]]))
        for _ in zip(range(12), kvalign.stream_tokens(made, torch.tensor([[5, 6, 7]]))):
            pass
for name, module in sys.modules.items():
    if name.partition(".")[0] == "kvalign" and getattr(module, "__file__", None):
        print(name, module.__file__)
"""


@dataclass(frozen=True, kw_only=True)
class CoreSizeSettings(Settings):
    """Count the calls of a decode step by function, and the lines of the core by package."""

    model: str = option(DEFAULT_MODEL, help="shipped model")
    method: str = option("streaming-llm", help="streaming method")
    num_steps: int = option(8, help="steps; the commonest number of calls counts", at_least=1)


def run(settings: CoreSizeSettings) -> None:
    calls = calls_of_step(settings.model, settings.method, settings.num_steps)
    for (module, function), num in sorted(calls.items()):
        print(f"{num:4} {module}:{function}")
    modules = {module for module, _ in calls}
    print(
        f"a step of {settings.method} on {settings.model}: {calls.total()} calls of {len(calls)} "
        f"functions in {len(modules)} modules\n"
    )
    lines = lines_of_core()
    for part, num in sorted(lines.items()):
        print(f"{num:5} {part}")
    core = sum(num for part, num in lines.items() if part not in (*OUTSIDE, "apart"))
    print(f"the core: {core} lines")


def calls_of_step(model: str, method: str, num_steps: int = 8) -> Counter[tuple[str, str]]:
    """Calls of our functions in one decode step of `kvalign generate`, by module and function. A
    generator that goes on counts as a call.
    """
    settings = GenerateSettings(
        model=model, method=method, cache_size=16, max_new_tokens=200, compile=False, seed=0
    )
    loaded = settings.load()
    stream = settings.stream(loaded, "The history of the island")
    pieces = marked(pieces_of(stream, "prompt"), stream)
    while stream.num_evicted < 20:
        next(pieces)
    steps = []
    while len(steps) < num_steps:
        num_before = len(stream.ids)
        calls = calls_of(lambda: next(pieces))
        if len(stream.ids) == num_before + 1:  # a piece may take several tokens
            steps.append(calls)
    commonest, _ = Counter(calls.total() for calls in steps).most_common(1)[0]
    return next(calls for calls in steps if calls.total() == commonest)


def calls_of(function: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Calls of our functions while a function runs, by module and name."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0] == "kvalign":
            calls[module, frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def lines_of_core() -> Counter[str]:
    """Lines by package of `kvalign`, and of all that is apart together."""
    lines: Counter[str] = Counter()
    for name, file in modules().items():
        inner = name.partition(".")[2]
        is_apart = any(f"{inner}.".startswith(f"{one}.") for one in APART)
        part = "apart" if is_apart else inner.partition(".")[0] or "kvalign"
        lines[part] += len(file.read_text().splitlines())
    return lines


def modules() -> dict[str, Path]:
    """Our modules that `LOADING` loads, with their files."""
    command = [sys.executable, "-c", LOADING]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pairs = (line.split(" ", 1) for line in printed.splitlines())
    return {name: Path(file) for name, file in pairs}


if __name__ == "__main__":
    run(parse(CoreSizeSettings, sys.argv[1:], "python tests/scripts/core_size.py")[0])
