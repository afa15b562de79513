"""Losses that the paper's authors measured, token by token, as a document of `kvalign eval
perplexity`: intervals, ratios on the same labels, drift.

    python tests/scripts/import_losses.py --losses nglls_gpt2 --model distilgpt2

They publish theirs for DistilGPT2 and SmolLM2, in perplexity_eval/ of
github.com/eecs585projectorg/kv-align: a tensor of 20 000 losses for each method and cache size, on
the same labels at one size: the first C + 1 tokens are input. The file name describes it:

    nglls_mode_MODE_tokens_N_cache_size_C[_model_name_MODEL_data_set_CORPUS].pt

Logs beside them (`Perplexity after N Label Tokens and Cache Size C with Mode MODE: P. Took S
seconds`) have the time of each. The tokens are not published, so there are no recall slices.
"""

import json
import re
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvalign.app.cli.arguments import parse
from kvalign.eval.evaluations.perplexity.scores import compare, of_losses
from kvalign.eval.protocol import SIZES
from kvalign.eval.protocol.document import document
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.settings import Settings, option

MODES = {
    "with_recompute": ("recompute", 0),
    "sliding_window": ("streaming-llm", 4),
    "key_value_net": ("kvalign", 4),
}
"""Our methods and their sinks, by the authors' modes."""

_NAME = re.compile(
    rf"nglls_mode_({'|'.join(MODES)})_tokens_(\d{{1,9}})_cache_size_(\d{{1,9}})"
    r"(?:_model_name_(.+?)_data_set_(.+))?\.pt"
)
_LOGGED = re.compile(
    r"Perplexity after (\d+) Label Tokens and Cache Size (\d+) with Mode (\w+): ([\d.]+)\. "
    r"Took ([\d.]+) seconds"
)
_ROUNDED = 1e-4  # share by which a log's perplexity may differ from that of the losses


@dataclass(frozen=True, kw_only=True)
class ImportLossesSettings(Settings):
    """Analyse the losses in a folder; nothing in the files is executed."""

    losses: Path = option(help="folder of the files nglls_mode_MODE_tokens_N_cache_size_C*.pt")
    model: str | None = option(None, help="name of the model (default: that in the files' names)")
    corpus: str | None = option(
        None, help="name of the text (default: that in the files' names, else wikitext)"
    )
    reference: str = option(
        "recompute",
        help="method that ratios are relative to, with 95 % intervals",
        choices=tuple(name for name, _ in MODES.values()),
    )


class _File(NamedTuple):
    path: Path
    mode: str
    num_labels: int
    cache_size: int
    model: str | None
    corpus: str | None


def run(settings: ImportLossesSettings) -> None:
    """Print one line of JSON, the document; its rows have seconds if logs in the folder or the one
    above it have those of every file.

    Raises:
        NotFoundError: the folder has no such file.
        UserError: a file that is damaged, contains something else, or names no model; a cache size
            without the reference.
    """
    started, folder = time.perf_counter(), settings.losses
    files = _files(folder)
    models = {one.model for one in files}
    if not (model := settings.model or (models.pop() if len(models) == 1 else None)):
        raise UserError(f"the files in {folder} name no model, or several: give --model")
    corpus = settings.corpus or files[0].corpus or "wikitext"
    losses = [_read(one) for one in files]
    rows = [_row(one, nll) for one, nll in zip(files, losses, strict=True)]
    for size in {row["cache_size"] for row in rows}:
        if (settings.reference, size) not in [(row["method"], row["cache_size"]) for row in rows]:
            raise UserError(
                f"{folder} has no {settings.reference} at C = {size}: name another --reference"
            )
    compare(rows, losses, settings.reference)
    seconds = _seconds(folder, files, rows)
    if all(seconds):
        rows = [row | {"seconds": s} for row, s in zip(rows, seconds, strict=True)]
    named = replace(settings, model=model, corpus=corpus)
    result = document("eval perplexity", named, rows, started=started)
    words = settings.command_line("tests/scripts/import_losses.py").removeprefix("kvalign ")
    result["command"] = f"python {words}"
    result["settings"]["stepwise"] = all(seconds)  # theirs have no faster way
    print(json.dumps(result))


def _files(folder: Path) -> list[_File]:
    files = [
        _File(path, name[1], int(name[2]), int(name[3]), name[4], name[5])
        for path in sorted(folder.glob("*.pt"))
        if (name := _NAME.fullmatch(path.name))
    ]
    if not files:
        raise NotFoundError(f"no file nglls_mode_MODE_tokens_N_cache_size_C*.pt in {folder}")
    order = list(MODES)
    return sorted(files, key=lambda one: (one.cache_size, order.index(one.mode)))


def _read(one: _File) -> torch.Tensor:
    """Losses [N] float32 in nats; nothing in the file is executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of the file is said below
            nll = torch.load(one.path, weights_only=True, map_location="cpu")
    except Exception:  # damaged bytes make torch raise any of a dozen kinds
        raise UserError(
            f"{one.path} is damaged or has more than a tensor, which is not executed"
        ) from None
    if not isinstance(nll, torch.Tensor) or nll.shape != (one.num_labels,):
        raise UserError(
            f"{one.path} must have {one.num_labels} losses, as its name says: one tensor"
        )
    return nll.float()


def _row(one: _File, nll: torch.Tensor) -> dict:
    method, num_sinks = MODES[one.mode]
    sizes = dict.fromkeys(SIZES) | {"method": method, "cache_size": one.cache_size}
    if method == "kvalign":
        sizes |= {"aligner": "network", "aligner_label": "network", "realign_every": 1}
    figures = of_losses(nll, one.cache_size, first_label=one.cache_size + 1)
    return {**sizes, "num_sinks": num_sinks, "num_evicted": 1, **figures}


def _seconds(folder: Path, files: list[_File], rows: list[dict]) -> list[float | None]:
    """Seconds of each row by the log that has its perplexity, None without one."""
    logs = [path for where in (folder, folder.absolute().parent) for path in where.glob("*.log")]
    runs = [run for path in sorted(logs) for run in _LOGGED.findall(path.read_text("utf-8"))]
    return [
        next(
            (
                float(took)
                for num, size, mode, ppl, took in runs
                if (int(num), int(size), mode) == (one.num_labels, one.cache_size, one.mode)
                and abs(float(ppl) / row["perplexity"] - 1) < _ROUNDED
            ),
            None,
        )
        for one, row in zip(files, rows, strict=True)
    ]


if __name__ == "__main__":
    run(parse(ImportLossesSettings, sys.argv[1:], "python tests/scripts/import_losses.py")[0])
