"""kill -9 at random moments, and the same command again: nothing corrupt, nothing lost, one result.

    python tests/scripts/faults.py --num-kills 100

Each command that writes (`helpers/writing_commands.py`) first runs undisturbed. Then it is killed,
with all its processes, and started again until it has been killed its share of times and ends by
itself. Every other kill is by the clock, in the last 60 % of the time that it took undisturbed; the
others are just before one of its writes, drawn from all that it made. After every kill each
file that counts as finished must be whole (corrupt), still be there and, unless the command writes
it anew, be what it was (lost), as the beginning of a conversation must; at the end the result must
be the undisturbed one, and nothing else may be there (left over): in the folder no file
that the undisturbed run does not leave, nor in the system's folder of temporary files (Ray's logs
of each session apart), and no process.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from safetensors import safe_open

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.server_kills import attack_sessions
from helpers.writing_commands import COMMANDS, RECORDING, SERVER, Command, prepare

from kvalign.foundation.files import sha256

BLOW = Path(__file__).parents[1] / "helpers" / "blow"
NEVER = 10**12


def check(path: Path) -> str:
    """What is wrong with a finished file, or ""."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
        elif path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".html":
            assert path.read_text(encoding="utf-8").rstrip().endswith("</html>"), "cut short"
        elif path.suffix == ".png":
            assert path.read_bytes()[-8:-4] == b"IEND", "cut short"
    except Exception as error:
        return f"{path}: {error}"
    return ""


def kinds_of_files(folder: Path) -> set[str]:
    """Files by their names, in which any number is one: of a trial, a sitting, a time. Of Ray's own
    folder, in which each run leaves the logs of its session, nothing below.
    """
    paths = [path for path in folder.rglob("*") if not is_of_python(path)]
    names = (str(path.relative_to(folder)) for path in paths)
    return {re.sub(r"\d+", "#", name) for name in names if not re.search("tmp/_?ray", name)}


def is_of_python(path: Path) -> bool:
    """Whether it is the file by which `tempfile` tries a folder, for the moment until it is gone:
    of Python itself, not of a command.
    """
    is_there = path.parent.name == "tmp" and re.fullmatch(r"[a-z0-9_]{8}", path.name)
    return bool(is_there) and path.is_file() and path.read_bytes() in (b"", b"blat")


class Arena:
    """A command in a folder of its own, with what it leaves in the system's temporary folder."""

    def __init__(self, command: Command, folder: Path):
        self.command, self.folder, self.out = command, folder, folder / "out"
        self.count = folder.with_suffix(".count")
        folder.mkdir()
        self.begin()

    def begin(self) -> None:
        """Forget what was written."""
        subprocess.run(["rm", "-rf", *map(str, self.folder.iterdir())], check=True)
        (self.folder / "tmp").mkdir()
        if self.command.before:
            self.command.before(self.out)

    def run(self, seconds: float | None = None, at: int = NEVER) -> bool:
        """Run the command; whether it was killed, after so long or at its n-th change of a file.

        Raises:
            RuntimeError: it failed, with what it says.
        """
        self.count.unlink(missing_ok=True)
        more = {
            "TMPDIR": str(self.folder / "tmp"),
            **dict(self.command.environment),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(BLOW), os.environ.get("PYTHONPATH")))),
            "FAULTS_FOLDER": str(self.folder),
            "FAULTS_COUNT": str(self.count),
            "FAULTS_AT": str(at),
        }
        words = [sys.executable, *self.command.python, *self.command.words.split()]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.PIPE)
        own = dict(env={**os.environ, **more}, start_new_session=True, text=True)
        with subprocess.Popen(words, cwd=self.folder, **own, **quiet) as process:
            try:
                error = process.communicate(self.command.say, timeout=seconds)[1]
            except subprocess.TimeoutExpired:
                self.kill()
                return True
        if process.returncode == -signal.SIGKILL:
            self.kill()
            return True
        if process.returncode and not (self.command.refused and self.command.refused in error):
            raise RuntimeError(f"exit code {process.returncode}: {error[-2000:]}")
        return False

    def kill(self) -> None:
        """kill -9 of the process and all that it has started: all with its environment."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        def is_ours(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error):
                return process.environ().get("FAULTS_COUNT") == str(self.count)
            return False

        return [process for process in psutil.process_iter() if is_ours(process)]

    def processes_left(self, seconds: float = 30) -> list[psutil.Process]:
        """Those that do not end: Ray's do so a moment after the command."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.5)
        return left

    def finished(self) -> dict[Path, str]:
        """The SHA-256 of the finished files, "" of one that a later run writes anew."""
        paths = [path for pattern in self.command.finished for path in self.out.glob(pattern)]
        anew = {path for pattern in self.command.rewritten for path in self.out.glob(pattern)}
        return {path: "" if path in anew else sha256(path) for path in paths if path.is_file()}

    def grown(self) -> list[int]:
        return self.command.grows(self.out) if self.command.grows else []


def attack(command: Command, num_kills: int, work: Path, rng: random.Random) -> dict[str, Any]:
    """Kill a command so many times: kills, files corrupt, lost and left over, and whether it ends
    the same.
    """
    began = time.perf_counter()
    found: dict[str, Any] = {"command": command.name, "kills": 0, "corrupt": [], "lost": []}
    found |= {"left_over": [], "same_result": True}
    try:
        fight(command, num_kills, work, rng, found)
    except Exception as error:  # it does not go on, or what it left cannot be read
        found["lost"].append(repr(error))
    return found | {"seconds": round(time.perf_counter() - began)}


def fight(
    command: Command, num_kills: int, work: Path, rng: random.Random, found: dict[str, Any]
) -> None:
    """Kill a command so many times, and add to what was found."""
    name = re.sub(r"\W+", "-", command.name)
    calm, fire = Arena(command, work / f"{name}-calm"), Arena(command, work / f"{name}-fire")
    began = time.perf_counter()
    calm.run()
    duration, num_changes = time.perf_counter() - began, calm.count.stat().st_size
    expected, known = command.result(calm.out), kinds_of_files(calm.folder)
    kept: dict[Path, str] = {}
    grown: list[int] = []
    for attempt in itertools.count():
        if found["kills"] == num_kills:
            was_killed = fire.run()
        elif attempt % 2:
            was_killed = fire.run(at=rng.randint(1, num_changes))
        else:
            was_killed = fire.run(seconds=rng.uniform(0.4, 1) * duration)
        there = fire.finished()
        found["corrupt"] += [wrong for path in there if (wrong := check(path))]
        found["lost"] += [str(path) for path, was in kept.items() if there.get(path) != was]
        before, grown = grown, fire.grown()
        if grown[: len(before)] != before:
            found["lost"].append(f"{len(before)} tokens, then {len(grown)} that differ")
        kept = there
        if was_killed:
            found["kills"] += 1
            continue
        found["same_result"] &= command.result(fire.out) == expected
        found["left_over"] += [str(process) for process in fire.processes_left()]
        found["left_over"] += sorted(kinds_of_files(fire.folder) - known)
        if found["kills"] == num_kills:
            return
        kept, grown = {}, []  # it ended before the blow: begin anew
        fire.begin()


def shares(num_kills: int, weights: list[float]) -> list[int]:
    """Whole numbers that add up to it."""
    ends = [round(num_kills * x / sum(weights)) for x in itertools.accumulate(weights)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", help="comma-separated (default: all)")
    args = parser.parse_args(argv)
    names = args.commands.split(",") if args.commands else [*(c.name for c in COMMANDS), SERVER]
    chosen = [command for command in COMMANDS if command.name in names]
    weights = [command.share for command in chosen] + [1.0] * (SERVER in names)
    rng, results = random.Random(args.seed), []
    with tempfile.TemporaryDirectory(prefix="kf") as place:  # short, for Ray's sockets
        work = Path(place)
        prepare(work)
        if any("../data" in command.words for command in chosen):
            Arena(RECORDING, work / "recording").run()
        for command, num_kills in itertools.zip_longest(chosen, shares(args.num_kills, weights)):
            if command is None:
                began = time.perf_counter()
                found = attack_sessions(work / "talks", num_kills, rng)
                found["seconds"] = round(time.perf_counter() - began)
            else:
                found = attack(command, num_kills, work, rng)
            results.append(found)
            print(json.dumps(found), flush=True)
    num_kills = sum(found["kills"] for found in results)
    num_corrupt = sum(len(found["corrupt"]) for found in results)
    num_left = sum(len(found["left_over"]) for found in results)
    num_lost = sum(len(found["lost"]) + (not found["same_result"]) for found in results)
    print(f"{num_kills} kills, {num_corrupt} corrupt, {num_lost} lost, {num_left} left over")
    return int(num_corrupt + num_lost + num_left > 0)


if __name__ == "__main__":
    sys.exit(main())
