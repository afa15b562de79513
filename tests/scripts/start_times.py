"""How long starts take, eager and with a compiled step that an earlier start has stored.

    python tests/scripts/start_times.py --model smollm2-135m-instruct --weights int4

A measurement, not a test. Both take turns, each in a process of its own.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from kvalign.app.cli.arguments import parse
from kvalign.foundation.settings import OF_WEIGHTS, WEIGHTS, Settings, option


@dataclass(frozen=True, kw_only=True)
class StartTimesSettings(Settings):
    """Time `kvalign generate`, from its start to its end after a few tokens, with --compile and
    without.

    Example:
        python tests/scripts/start_times.py --num-runs 5
    """

    model: str = option("llama-mini", help="model to load")
    weights: str = option("auto", help=OF_WEIGHTS, choices=WEIGHTS)
    num_runs: int = option(5, help="runs of each; medians count", at_least=1)
    num_tokens: int = option(4, help="tokens that each run writes", at_least=1)


def run(settings: StartTimesSettings) -> int:
    """Print the medians and their difference."""
    words = ["--model", settings.model, "--weights", settings.weights, "--method", "streaming-llm"]
    words += ["--max-new-tokens", str(settings.num_tokens)]
    eagerly, compiling = [*words, "--no-compile"], [*words, "--compile"]
    first = seconds(compiling)
    pairs = [(seconds(eagerly), seconds(compiling)) for _ in range(settings.num_runs)]
    eager, compiled = map(statistics.median, zip(*pairs, strict=True))
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"eager {eager:.1f} s, compiled {compiled:.1f} s: {compiled - eager:+.1f} s")
    print(f"medians of {settings.num_runs} runs; first compiled start {first:.1f} s; load {load}")
    return 0


def seconds(words: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "kvalign", "generate", *words]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run(parse(StartTimesSettings, words, "python tests/scripts/start_times.py")[0]))
