"""How long help takes: `kvalign --help` should answer in 0.5 s, that of each command in 1 s.

    python tests/scripts/help_times.py

A measurement, not a test: a busy machine takes longer, so the load is printed with the medians.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from kvalign.app.cli.arguments import parse
from kvalign.app.cli.main import COMMANDS
from kvalign.foundation.settings import Settings, option

LIMIT_S, COMMAND_LIMIT_S = 0.5, 1.0


@dataclass(frozen=True, kw_only=True)
class HelpTimesSettings(Settings):
    """Time `kvalign --help` and that of every command, each in a process of its own.

    Example:
        python tests/scripts/help_times.py --num-runs 5
    """

    num_runs: int = option(5, help="runs of each; the median counts", at_least=1)


def run(settings: HelpTimesSettings) -> int:
    """Print the table; 1 if a median is above its limit."""
    slow = 0
    for command in ("", *COMMANDS):
        limit = COMMAND_LIMIT_S if command else LIMIT_S
        median = statistics.median(seconds(command) for _ in range(settings.num_runs))
        slow += median > limit
        what = f"kvalign {command} --help".replace("  ", " ")
        print(f"{what:34} {median:.3f} s" + (f"  above {limit} s" if median > limit else ""))
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"medians of {settings.num_runs} runs; {os.cpu_count()} cores, load {load}")
    return int(slow > 0)


def seconds(command: str) -> float:
    """Wall time of one help."""
    start = time.perf_counter()
    words = [sys.executable, "-m", "kvalign", *command.split(), "--help"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(run(parse(HelpTimesSettings, sys.argv[1:], "python tests/scripts/help_times.py")[0]))
