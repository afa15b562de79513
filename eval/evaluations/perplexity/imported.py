"""Losses that others measured, token by token, as a document of `kvalign eval perplexity`.

The authors of KV-Align publish theirs, for DistilGPT2 and SmolLM2: a tensor of 20 000 losses for
each method and cache size, on the same labels at one size: the first C + 1 tokens are input. The
file name describes it:

    nglls_mode_MODE_tokens_N_cache_size_C[_model_name_MODEL_data_set_CORPUS].pt

Logs beside them (`Perplexity after N Label Tokens and Cache Size C with Mode MODE: P. Took S
seconds`) have the time of each. The tokens are not published, so there are no recall slices.
"""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvalign.eval.evaluations.perplexity import Perplexity
from kvalign.eval.protocol import SIZES, Document, Row
from kvalign.eval.protocol.document import document, write
from kvalign.eval.protocol.settings import ResultSettings
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.settings import option

if TYPE_CHECKING:
    from torch import Tensor

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
class ImportLossesSettings(ResultSettings):
    """Read losses that the paper's authors measured, one file for each method and cache size. Show
    them as `kvalign eval perplexity` shows ours: intervals, ratios on the same labels, drift.

    The files are in perplexity_eval/ of github.com/eecs585projectorg/kv-align; nothing in them is
    executed. --out writes a document for `kvalign report`.

    Example:
        kvalign eval import-losses --losses nglls_gpt2 --model distilgpt2
    """

    losses: Path = option(help="folder of the files nglls_mode_MODE_tokens_N_cache_size_C*.pt")
    model: str | None = option(
        None, help="name of the model (default: the one in the files' names)"
    )
    corpus: str | None = option(
        None, help="name of the text (default: the one in the files' names, else wikitext)"
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


def import_losses(settings: ImportLossesSettings) -> Document:
    """Analyse the losses in a folder.

    Returns:
        A document of `kvalign eval perplexity`; its rows have seconds if logs in the folder or the
        one above it have those of every file.

    Raises:
        NotFoundError: the folder has no such file.
        UserError: a file that is damaged, contains something else, or names no model; a cache size
            without the reference.
    """
    from kvalign.eval.evaluations.perplexity.scores import compare

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
    of_file = replace(settings, model=model, corpus=corpus, out=None, csv=None)
    result = document("eval import-losses", of_file, rows, started=started)
    result |= {"kind": "eval perplexity", "command": settings.command_line("eval import-losses")}
    result["settings"]["stepwise"] = all(seconds)  # theirs have no faster way
    write(result, settings)
    return result


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


def _read(one: _File) -> Tensor:
    """Losses [N] float32 in nats; nothing in the file is executed."""
    import torch

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


def _row(one: _File, nll: Tensor) -> Row:
    from kvalign.eval.evaluations.perplexity.scores import of_losses

    method, num_sinks = MODES[one.mode]
    sizes = dict.fromkeys(SIZES) | {"method": method, "cache_size": one.cache_size}
    if method == "kvalign":
        sizes |= {"aligner": "network", "aligner_label": "network", "realign_every": 1}
    figures = of_losses(nll, one.cache_size, first_label=one.cache_size + 1)
    return {**sizes, "num_sinks": num_sinks, "num_evicted": 1, **figures}


def _seconds(folder: Path, files: list[_File], rows: list[Row]) -> list[float | None]:
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


class ImportedLosses(Perplexity):
    settings = ImportLossesSettings
    run = staticmethod(import_losses)


EVALUATION = ImportedLosses()
