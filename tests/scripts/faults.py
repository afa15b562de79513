"""kill -9 at random moments, and the same command again: nothing corrupt, nothing lost, one result.

    python tests/scripts/faults.py --num-kills 50

Each command first runs undisturbed. Then it is killed, with all its processes, at random moments
and started again until it has been killed its share of times and ends by itself. After every kill
each file that counts as finished must be whole (corrupt) and still be what it was before (lost);
at the end the result must be the undisturbed one: the same bytes of recorded data, the same loss
of a trained network to 1e-6, the same rows of a suite but for times, as many finished trials, the
same weights of a language model, the same first answer of a conversation. Then nothing may be left
over: no temporary file of a run that was killed.
"""

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import safe_open

SUITE = """
cells:
  - name: window
    command: >-
      eval perplexity --methods window --cache-sizes 16 --num-tokens 300 --keep {out}/losses
  - name: kvalign
    command: >-
      eval perplexity --methods kvalign,recompute --cache-sizes 16,32 --num-tokens 900
      --keep {out}/losses
  - name: chat
    command: >-
      eval chat --methods window,kvalign --cache-sizes 32 --num-turns 4 --max-new-tokens 40
"""
TIMES = ("seconds",)
DONE = "already holds a trained"  # `train`, when the blow fell after all was written


@dataclass(frozen=True)
class Command:
    """A command under fire.

    Attributes:
        words: after `kvalign`; it writes to `out`.
        finished: patterns of the files that are finished once they are there, by what reads them.
        result: what must be the same in the end.
        say: what is typed.
    """

    name: str
    words: str
    finished: tuple[str, ...]
    result: Callable[[Path], Any]
    say: str = ""


def _recorded(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.*")) if path.name[0] != "."}


def _trained(out: Path) -> dict[str, float]:
    config = json.loads((out / "config.json").read_text())
    return {target: round(run["val_loss"], 6) for target, run in config["training"].items()}


def _evaluated(out: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [
            {name: value for name, value in row.items() if name not in TIMES}
            for row in json.loads(path.read_text())["rows"]
        ]
        for path in sorted(out.glob("*.json"))
    }


def _swept(out: Path) -> int:
    with (out / "trials.csv").open() as file:
        return len(list(csv.DictReader(file)))


def _tables(out: Path) -> dict[str, float]:
    config = json.loads((out / "config.json").read_text())
    return {kv: round(part["val_loss"], 6) for kv, part in config["training"].items()}


def _language_model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def _conversation(out: Path) -> list[int]:
    with safe_open(out / "talk.safetensors", "pt") as file:
        return file.get_tensor("ids").tolist()[:60]


def _kept_losses(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.parquet"))


COMMANDS = (
    Command(
        "gen-data",
        "gen-data --num-tokens 20000 --chunk-len 64 --shard-mb 2 --out out",
        ("config.json", "*.safetensors", "manifest.json"),
        _recorded,
    ),
    Command(
        "train",
        "train --data data --out out --max-steps 400 --batch-size 256 --vals-per-epoch 20",
        ("config.json", "*.safetensors", "training/*/*.json"),
        _trained,
    ),
    Command(
        "tune",
        "tune --target key --data data --out out --num-trials 3 --max-steps 60",
        ("sweep.json", "trials.csv"),
        _swept,
    ),
    Command(
        "eval run",
        "eval run ../suite.yaml --out out",
        ("*.json", "losses/*.parquet", "suite.yaml"),
        _evaluated,
    ),
    Command(
        "train table",
        "train --aligner-kind table --num-tokens 20000 --chunk-len 64 --num-threads 1 --out out",
        ("config.json", "*.safetensors"),
        _tables,
    ),
    Command(
        "pretrain",
        "pretrain --out out --num-tokens 40000 --context-len 64 --num-layers 1 --hidden-size 64 "
        "--vocab-size 300 --save-minutes 0.02 --num-threads 1",
        ("config.json", "model.safetensors", "training/*.json"),
        _language_model,
    ),
    Command(
        "chat",
        "chat --state out/talk.safetensors --method streaming-llm --cache-size 32 --no-do-sample "
        "--max-new-tokens 60",
        ("*.safetensors",),
        _conversation,
        "Who lived here?\nWhy?\nAnd then?\n",
    ),
    Command(
        "eval perplexity",
        "eval perplexity --methods window,recompute --cache-sizes 16,32 --num-tokens 900 "
        "--keep out",
        ("*.parquet",),
        _kept_losses,
    ),
)


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
    except Exception as error:
        return f"{path}: {error}"
    return ""


def is_left_over(path: Path) -> bool:
    """Whether it is a temporary file: ours, of safetensors, of Ray or of Tune."""
    return any(word in path.name for word in (".partial", ".tmp", "tmp_", ".lock_"))


def start(command: Command, folder: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "kvalign", *command.words.split()]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.PIPE)
    run = subprocess.Popen(words, cwd=folder, start_new_session=True, text=True, **quiet)
    run.stdin.write(command.say)
    run.stdin.close()
    run.stdin = None
    return run


def end(run: subprocess.Popen) -> None:
    """kill -9 of the process and all it has started."""
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def finish(command: Command, folder: Path) -> None:
    run = start(command, folder)
    error = run.communicate()[1]
    if run.returncode and DONE not in error:
        raise SystemExit(f"kvalign {command.words} ended with {run.returncode}: {error[-2000:]}")


def attack(command: Command, num_kills: int, work: Path, rng: random.Random) -> dict[str, Any]:
    """Kill a command so many times: kills, files corrupt and lost, and whether it ends the same."""
    calm, fire = work / f"{command.name}-calm", work / f"{command.name}-fire"
    for folder in (calm, fire):
        folder.mkdir()
        (folder / "data").symlink_to(work / "data")
    began = time.perf_counter()
    finish(command, calm)
    duration = time.perf_counter() - began
    kept: dict[Path, bytes] = {}
    found = {"command": command.name, "kills": 0, "corrupt": [], "lost": []}
    while found["kills"] < num_kills:
        run = start(command, fire)
        # Most of a short command is its start: aim at what comes after it, too.
        try:
            error = run.communicate(timeout=rng.uniform(0.2, 1.1) * duration)[1]
        except subprocess.TimeoutExpired:
            end(run)
            found["kills"] += 1
        else:
            if run.returncode and DONE not in error:
                raise SystemExit(f"kvalign {command.words} refused to go on: {error[-500:]}")
            if command.result(fire / "out") != command.result(calm / "out"):
                found["lost"].append("the result")
            _forget(fire / "out", kept)  # it ended before the blow: begin anew
            continue
        there = {p: p.read_bytes() for q in command.finished for p in (fire / "out").glob(q)}
        found["corrupt"] += [wrong for path in there if (wrong := check(path))]
        found["lost"] += [str(path) for path in kept if path not in there]
        kept = there
    finish(command, fire)
    found["left_over"] = [str(p) for p in fire.rglob("*") if is_left_over(p)]
    found["same_result"] = command.result(fire / "out") == command.result(calm / "out")
    return found


def _forget(out: Path, kept: dict[Path, bytes]) -> None:
    subprocess.run(["rm", "-rf", str(out)], check=True)
    kept.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    names = [command.name for command in COMMANDS]
    parser.add_argument("--commands", default=",".join(names))
    args = parser.parse_args()
    chosen = [command for command in COMMANDS if command.name in args.commands.split(",")]
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        (work / "suite.yaml").write_text(SUITE)
        data = "gen-data --num-tokens 20000 --chunk-len 64 --out data"
        finish(Command("data", data, (), lambda out: None), work)
        results = []
        for i, command in enumerate(chosen):
            share = args.num_kills * (i + 1) // len(chosen) - args.num_kills * i // len(chosen)
            results.append(attack(command, share, work, rng))
            print(json.dumps(results[-1]), flush=True)
    num_kills = sum(found["kills"] for found in results)
    num_corrupt = sum(len(found["corrupt"]) for found in results)
    num_left = sum(len(found["left_over"]) for found in results)
    num_lost = sum(len(found["lost"]) + (not found["same_result"]) for found in results)
    print(f"{num_kills} kills, {num_corrupt} corrupt, {num_lost} lost, {num_left} left over")
    return int(num_corrupt + num_lost + num_left > 0)


if __name__ == "__main__":
    sys.exit(main())
