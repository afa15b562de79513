"""README's commands in their order, as a newcomer types them: in an empty folder, without another
flag, with the time of each.

    python tests/scripts/first_hour.py

`pip` and `make` are left out: they need a clone. `kvalign chat` is asked one question.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
QUESTION = "What is a tide?\n"


def commands() -> list[list[str]]:
    """Words of the commands that README names, and of its Python example, each once."""
    text = README.read_text(encoding="utf-8")
    found: list[list[str]] = []
    for block, line in re.findall(
        r"```(?:bash|python)\n(.*?)```|`(kvalign [a-z][^`]*)`", text, re.S
    ):
        if "import kvalign" in block:
            found.append([sys.executable, "-c", block])
        for command in filter(None, [line, *block.splitlines()]):
            if command.startswith("kvalign "):
                found.append(["bash", "-c", command])
    return [words for i, words in enumerate(found) if words not in found[:i]]


def main() -> int:
    failed, path = 0, f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        for words in commands():
            start = time.perf_counter()
            done = subprocess.run(
                words,
                cwd=folder,
                env=os.environ | {"PATH": path},
                input=QUESTION,
                text=True,
                capture_output=True,
            )
            seconds = time.perf_counter() - start
            failed += done.returncode != 0
            title = words[-1].splitlines()[0]
            print(f"{seconds:7.1f} s, exit code {done.returncode}: {title}", flush=True)
            for line in (done.stderr if done.returncode else "").splitlines()[-3:]:
                print(f"          {line}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
