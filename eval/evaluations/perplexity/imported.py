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

from kvalign.eval.protocol.evaluation import Document, Row
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
        NotFoundError: the folder does not exist, or has no such file.
        UserError: a file that is damaged, contains something else, or names no model; a cache size
            without the reference or with another number of labels.
    """
    from kvalign.eval.evaluations.perplexity.scores import compare
    from kvalign.eval.protocol.document import document, write

    started = time.perf_counter()
    files = _files(settings.losses)
    model = settings.model or _only({one.model for one in files}, "model", settings)
    corpus = settings.corpus or _only(
        {one.corpus or "wikitext" for one in files}, "corpus", settings
    )
    losses = [_read(one) for one in files]
    rows = [_row(one, nll) for one, nll in zip(files, losses, strict=True)]
    for size in {one.cache_size for one in files}:
        of_size = [one for one in files if one.cache_size == size]
        if (name := settings.reference) not in [MODES[one.mode][0] for one in of_size]:
            raise UserError(
                f"{settings.losses} has no {name} at C = {size}: name another --reference"
            )
        if len({one.num_labels for one in of_size}) > 1:
            raise UserError(
                f"{settings.losses} has other numbers of labels at C = {size}: leave one out"
            )
    compare(rows, losses, settings.reference)
    seconds = _log_figures(settings.losses)
    times = [_time_of(row, one, seconds) for row, one in zip(rows, files, strict=True)]
    if all(times):
        rows = [row | {"seconds": s} for row, s in zip(rows, times, strict=True)]
    of_file = replace(settings, model=model, corpus=corpus, out=None, csv=None)
    result = document("eval import-losses", of_file, rows, started=started)
    result |= {"kind": "eval perplexity", "command": settings.command_line("eval import-losses")}
    result["settings"]["stepwise"] = all(times)  # theirs have no faster way
    write(result, settings)
    return result


def _files(folder: Path) -> list[_File]:
    if not folder.is_dir():
        raise NotFoundError(f"no folder {str(folder)!r}: name one with files nglls_mode_*.pt")
    matches = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("*.pt"))]
    files = [
        _File(path, name[1], int(name[2]), int(name[3]), name[4], name[5])
        for path, name in matches
        if name
    ]
    if not files:
        raise NotFoundError(f"no file nglls_mode_MODE_tokens_N_cache_size_C*.pt in {folder}")
    order = list(MODES)
    return sorted(files, key=lambda one: (one.cache_size, order.index(one.mode)))


def _only(names: set[str | None], what: str, settings: ImportLossesSettings) -> str:
    """The one name that the files have."""
    (name, *others) = sorted(filter(None, names)) or [""]
    if not name or others:
        problem = f"are of several: {name}, {', '.join(others)}" if others else f"name no {what}"
        raise UserError(f"the files in {settings.losses} {problem}: give --{what}")
    return name


def _read(one: _File) -> Tensor:
    """Losses [N] float32 in nats; nothing in the file is executed."""
    import torch

    from kvalign.streaming.health import MOST_LOSS

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of the file is said below
            nll = torch.load(one.path, weights_only=True, map_location="cpu")
    except Exception:  # damaged bytes make torch raise any of a dozen kinds
        raise UserError(
            f"{one.path} is damaged or has more than a tensor, which is not executed"
        ) from None
    is_list = isinstance(nll, torch.Tensor) and nll.ndim == 1 and nll.layout == torch.strided
    if not is_list or not nll.is_floating_point() or len(nll) != one.num_labels or not len(nll):
        raise UserError(
            f"{one.path} must have {one.num_labels} losses, as its name says: one tensor"
        )
    if not (nll.double().abs() <= MOST_LOSS).all():
        raise UserError(f"{one.path} has losses that are not finite, or not from a model")
    return nll.float()


def _row(one: _File, nll: Tensor) -> Row:
    from kvalign.eval.evaluations.perplexity.scores import of_losses
    from kvalign.eval.protocol.evaluation import SIZES

    method, num_sinks = MODES[one.mode]
    sizes = dict.fromkeys(SIZES) | {"method": method, "cache_size": one.cache_size}
    if method == "kvalign":
        sizes |= {"aligner": "network", "aligner_label": "network", "realign_every": 1}
    figures = of_losses(nll, one.cache_size, first_label=one.cache_size + 1)
    return {**sizes, "num_sinks": num_sinks, "num_evicted": 1, **figures}


def _log_figures(folder: Path) -> dict[tuple[str, int, int], list[tuple[float, float]]]:
    """Perplexities and seconds that logs tell, by mode, cache size and labels."""
    figures: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    logs = [path for where in (folder, folder.absolute().parent) for path in where.glob("*.log")]
    for path in sorted(logs):
        for num, size, mode, ppl, took in _LOGGED.findall(path.read_text("utf-8", "replace")):
            figures.setdefault((mode, int(size), int(num)), []).append((float(ppl), float(took)))
    return figures


def _time_of(
    row: Row, one: _File, logged: dict[tuple[str, int, int], list[tuple[float, float]]]
) -> float | None:
    """Seconds of a row by the log that has its perplexity, None without one."""
    runs = logged.get((one.mode, one.cache_size, one.num_labels), [])
    ppl = row["perplexity"]
    return next((took for p, took in runs if abs(p / ppl - 1) < _ROUNDED), None)
