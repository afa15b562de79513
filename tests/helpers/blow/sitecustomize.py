"""Every Python process under fire imports this: it counts what is done to the files of a folder,
and before the n-th change all of them are killed (`tests/scripts/faults.py`).
"""

import os
import signal
import sys

CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")


def watch(folder: str, count: str, at: int) -> None:
    """Let `count` grow by a byte at each change below the folder; kill at so many."""
    counted = os.open(count, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def hook(event: str, args: tuple) -> None:
        writes = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if (not writes and event not in CHANGES) or not isinstance(args[0], str | os.PathLike):
            return
        if os.path.abspath(args[0]).startswith(folder):
            os.write(counted, b".")
            if os.fstat(counted).st_size == at:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)


if folder := os.environ.get("FAULTS_FOLDER"):
    watch(folder, os.environ["FAULTS_COUNT"], int(os.environ["FAULTS_AT"]))
