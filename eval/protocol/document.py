"""Document of an evaluation: rows, the command that made them, and the environment.

    {"kind": "eval perplexity", "command": "kvalign eval perplexity --model ...",
     "settings": {...}, "environment": {...}, "rows": [{...}, ...], "seconds": 12.3,
     "auto": [{"cache_size": 64, "method": "kvalign", "why": "...", "num_labels": None}, ...]}

`kvalign eval run` keeps one for each cell, with what it `changed` of the suite.

Parts of a long evaluation are `kept` as they end: rows here, losses by `perplexity`. A file's name
depends on everything that its numbers depend on, and it has a checksum: one that is damaged is
measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import kvalign
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol import ComparisonSettings, ResultSettings
from kvalign.eval.protocol.data import Document, Row
from kvalign.eval.protocol.tables import csv_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.progress import warn_once
from kvalign.foundation.settings import Settings, keywords_of

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel

S = TypeVar("S", bound=ComparisonSettings)

_FLAGS = r"avx|avx2|avx_vnni|avx512f|avx512_\w+|amx_\w+|asimd\w*|i8mm|sve\w*"


def measures(
    cls: type[S],
) -> Callable[[Callable[[S, LoadedModel, list[Method]], Iterable[Row]]], Callable[..., Document]]:
    """Decorator for a function that measures the rows of the evaluation of its name. It becomes the
    public function, of settings or their fields as keywords and of a loaded model, which returns
    the document.
    """

    def decorate(
        measure: Callable[[S, LoadedModel, list[Method]], Iterable[Row]],
    ) -> Callable[..., Document]:
        kind = f"eval {measure.__name__}"

        def run(settings: S, *, loaded: LoadedModel | None = None) -> Document:
            from kvalign.eval.protocol.grid import chosen_by_auto, load, make_grid

            started = time.perf_counter()
            settings, loaded = load(settings, loaded)
            rows = [*measure(settings, loaded, make_grid(settings, loaded.model))]
            auto = chosen_by_auto(settings, loaded.model)
            return document(kind, settings, rows, started=started, auto=auto)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(run, name, getattr(measure, name))
        return keywords_of(cls)(progress.shown_as(kind)(run))

    return decorate


def document(
    kind: str, settings: Settings, rows: list[Row], *, started: float, **more: Any
) -> Document:
    """Rows with everything needed to make them again, and further entries.

    Args:
        kind: "eval " and the evaluation's name.
        settings: of the run.
        rows: of values that JSON knows.
        started: `time.perf_counter()` when the work began.

    Files that the settings name are written.
    """
    values = settings.as_dict()
    if "device" in values:
        from kvalign.foundation.machine import resolved

        values["device"] = resolved(values["device"])
    result = {
        "kind": kind,
        "command": settings.command_line(kind),
        "settings": values,
        "environment": environment(values.get("device")),
        "rows": rows,
        "seconds": time.perf_counter() - started,
        **more,
    }
    if isinstance(settings, ResultSettings):  # a script writes its own
        from kvalign.foundation.files import write_json, write_text

        if settings.out:
            write_json(settings.out, result)
        if settings.csv:
            write_text(settings.csv, csv_of(rows))
    if values.get("plot"):
        from kvalign.eval.drawing import save

        drawing = EVALUATIONS[kind.removeprefix("eval ")].figure(result)
        assert drawing
        save(drawing[0], Path(values["plot"]))
    return result


def environment(device: str | None = "cpu") -> dict[str, str | int | float]:
    """Versions, the commit (of an installed package its version), the processor with its flags,
    the GPU, if that is the device, the load of the last minute, and threads; without a device no
    model has run, and torch is not asked.
    """
    packages = ("torch", "transformers") if device else ("nltk",)
    machine: dict[str, str | int | float] = {
        "kvalign": kvalign.__version__,
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "commit": _commit() or f"none: kvalign {kvalign.__version__}, installed",
        **_processor(),
        "cores": os.cpu_count() or 1,
        **({"load": round(os.getloadavg()[0], 1)} if hasattr(os, "getloadavg") else {}),
    }
    if device is None:
        return machine
    import torch

    if device.startswith("cuda"):
        machine["device"] = torch.cuda.get_device_name(device)
    elif device != "cpu":
        machine["device"] = device
    return machine | {"threads": torch.get_num_threads()}


def _processor() -> dict[str, str]:
    """The processor's name, and which of its instructions make products of matrices fast."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {"device": platform.processor() or platform.machine(), "flags": ""}
    name = re.search(r"^model name.*?:(.*)", about, re.MULTILINE)
    flags = sorted(set(re.findall(rf"\b(?:{_FLAGS})\b", about)))
    return {"device": name[1].strip() if name else platform.machine(), "flags": " ".join(flags)}


def _commit() -> str:
    """The checkout's commit, or "" for an installed package. KVALIGN_COMMIT says it for a copy
    without its history, such as one on a machine that is lent for minutes.
    """
    if commit := os.environ.get("KVALIGN_COMMIT"):
        return commit
    folder = Path(kvalign.__file__).parents[1]
    if not (folder / ".git").exists():
        return ""

    def git(*words: str) -> str:
        # `describe --dirty` writes the index, and leaves its lock where that fails.
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        is_changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("describe", "--always") + "-dirty" * is_changed
    except (OSError, subprocess.TimeoutExpired):
        return ""


def kept(folder: Path | None, key: dict[str, Any], measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part: those in the folder, or measured and written there; without a folder they
    are measured.
    """
    from kvalign.foundation.files import read_json, write_json

    if folder is None:
        return measure()
    text = json.dumps(key, default=str, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if path.exists():
        try:
            saved = read_json(path)
            if saved["crc32"] == _sum_of(saved["rows"]):
                return saved["rows"]
        except (UserError, KeyError):
            pass
        say_damaged(path)
    rows = measure()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"key": json.loads(text), "crc32": _sum_of(rows), "rows": rows})
    return rows


def _sum_of(rows: list[Row]) -> int:
    return crc32(json.dumps(rows).encode())


def say_damaged(path: Path) -> None:
    warn_once(f"{path} is damaged: it is measured again, not read")


def summary_of(folder: Path | None) -> str:
    """Return what a folder keeps of an interrupted run."""
    paths = folder.glob("[!.]*.*") if folder else ()
    num_parts = sum(path.suffix in (".json", ".parquet") for path in paths)
    return f"{num_parts} finished parts are kept in {folder}" if num_parts else ""
