"""Parts of a long evaluation that are kept as they end, so that a run that was interrupted does not
begin anew. A file's name depends on everything that its numbers depend on, and it has a checksum:
one that is damaged is measured again.

Rows of a part are a JSON file. Losses of every scored token are a Parquet file for each method and
size, which has all losses after the method's first input: so a longer run serves a shorter one, and
one of other cache sizes.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kvalign.eval.protocol import Row
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_json, write_json, write_whole
from kvalign.foundation.folders import as_file_name
from kvalign.foundation.progress import warn_once
from kvalign.methods.base import Method
from kvalign.models.identity import identity

_INFORMATIVE = ("_name_or_path", "transformers_version")  # in a model's config


def kept(folder: Path | None, key: dict[str, Any], measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part: those in the folder, or measured and written there; without a folder they
    are measured.
    """
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
        _say_damaged(path)
    rows = measure()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"key": json.loads(text), "crc32": _sum_of(rows), "rows": rows})
    return rows


def _sum_of(rows: list[Row]) -> int:
    return crc32(json.dumps(rows).encode())


def _say_damaged(path: Path) -> None:
    warn_once(f"{path} is damaged: it is measured again, not read")


def summary_of(folder: Path | None) -> str:
    """Return what a folder keeps of an interrupted run."""
    paths = folder.glob("[!.]*.*") if folder else ()
    num_parts = sum(path.suffix in (".json", ".parquet") for path in paths)
    return f"{num_parts} finished parts are kept in {folder}" if num_parts else ""


def read_losses(folder: Path, key: dict[str, Any], labels: Tensor) -> tuple[Tensor, float] | None:
    """NLL [N] float32 in nats of labels [N] and their share of the seconds for all kept ones, or
    None.
    """
    path = _path(folder, key)
    if not path.exists():
        return None
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        seconds = json.loads(table.schema.metadata[b"kvalign"])["seconds"]
        tokens, nll = (torch.tensor(table.column(n).to_numpy()) for n in ("token", "nll_nats"))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        _say_damaged(path)
        return None
    num = len(labels)
    if not torch.equal(tokens[:num], labels.cpu()):
        return None  # fewer, or another text with the same beginning
    return nll[:num], seconds * (num / len(nll))


def write_losses(
    folder: Path, key: dict[str, Any], labels: Tensor, nll: Tensor, seconds: float
) -> None:
    """Write the losses of labels [N] and the labels themselves."""
    path = _path(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"token": labels.cpu().numpy(), "nll_nats": nll.float().cpu().numpy()},
        metadata={b"kvalign": json.dumps({"key": key, "seconds": seconds}).encode()},
    )
    write_whole(path, lambda partial: pq.write_table(table, partial, write_page_checksum=True))


def key_of(method: Method, ids: Tensor, stepwise: bool) -> dict[str, Any]:
    """Return everything that the losses of `method` on ids [1, N] depend on."""
    aligner = getattr(method, "aligner", None)
    config = method.model.config.to_dict()
    config = {name: x for name, x in config.items() if name not in _INFORMATIVE}
    return {
        "method": method.name,
        "aligner": aligner and aligner.label,  # not its name, which depends on those beside it
        **asdict(method.sizes),
        "aligner_sha256": _digest(*aligner.state_dict().values()) if aligner else None,
        "model": identity(method.model),
        "config": config,
        "first_input_sha256": _digest(ids[:, : method.sizes.cache_size + 1]),
        "stepwise": stepwise,
    }


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _path(folder: Path, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    sizes = f"C{key['cache_size']}-s{key['num_sinks']}-k{key['num_evicted']}"
    label = as_file_name("-".join(filter(None, (key["method"], key["aligner"]))))
    return folder / f"{label}-{sizes}-{digest}.parquet"
