"""What there is to choose from: models, methods, aligners, corpora, suites. Nothing is listed here;
each is read from its registry or from the config in its folder.
"""

import json
import logging
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from kvalign import checkpoints

log = logging.getLogger(__name__)

Row = dict[str, Any]


def models() -> list[Row]:
    """The shipped models, then those of the hub's cache that KV-Align can stream."""
    from transformers import AutoConfig

    from kvalign.models import FAMILIES, spec_of

    def row(name: str, folder: Path) -> Row | None:
        weights = any(folder.glob("*.safetensors"))
        if not weights or _config(folder).get("model_type") not in FAMILIES:
            return None
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        spec = spec_of(config, name)
        return {
            "architecture": spec.model_type,
            "positions": spec.family,
            "context_len": spec.context_len,
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "default_aligner": checkpoints.default_aligner(name),
        }

    return list(_rows(checkpoints.MODELS, row))


def architectures() -> list[Row]:
    """Architectures that KV-Align can stream, and how each encodes positions."""
    from kvalign.models import FAMILIES

    return [{"architecture": name, "positions": family} for name, family in FAMILIES.items()]


def methods() -> list[Row]:
    """The registry of methods."""
    from kvalign.methods import METHODS

    return [{"name": name, "about": cls.about} for name, cls in METHODS.items()]


def method_names() -> tuple[str, ...]:
    """The names in `methods()`, without importing torch: a method is a file."""
    files = Path(checkpoints.__file__).parents[1].joinpath("methods").glob("*.py")
    names = sorted(file.stem.replace("_", "-") for file in files)
    return tuple(name for name in names if name not in ("--init--", "base"))


def aligners() -> list[Row]:
    """The shipped aligners, then those of the hub's cache."""
    from kvalign.aligners import KINDS, Aligner

    def row(name: str, folder: Path) -> Row | None:
        if _config(folder).get("kind") not in KINDS:
            return None
        aligner = Aligner.from_pretrained(folder)
        config = aligner.config
        parts = {key: part for key, part in config.training.items() if isinstance(part, dict)}
        return {
            "base_model": config.base_model,
            "kind": config.kind,
            "label": aligner.label,
            "max_cache_size": config.chunk_len - 1,
            "num_sinks": config.num_sinks,
            "realigns": [key for key, part in parts.items() if part.get("used", True)],
            "trained_on": sorted({_text(part.get("data")) for part in parts.values()}),
        }

    return list(_rows(checkpoints.ALIGNERS, row))


def corpora() -> list[Row]:
    """What a corpus may be called."""
    from kvalign.data_gen.corpora import SPECS

    return [{"name": name, "about": about} for name, about in SPECS.items()]


def suites() -> dict[str, str]:
    """The text of each shipped suite, by its name."""
    files = resources.files("kvalign.eval").joinpath("suites").iterdir()
    return {Path(file.name).stem: file.read_text(encoding="utf-8") for file in files}


def cached(repo_type: str) -> Iterator[tuple[str, Path]]:
    """Name and folder of each repository in the hub's cache, as its main branch was last seen.

    Args:
        repo_type: `model` or `dataset`.
    """
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError, OSError):  # none, or none that can be read
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == repo_type and "main" in repo.refs:
            yield repo.repo_id, repo.refs["main"].snapshot_path


def show(as_json: bool, **tables: list[Row]) -> None:
    """Print tables of rows, or one JSON document with them by name."""
    print(json.dumps(tables) if as_json else "\n\n".join(map(as_text, tables.values())))


def as_text(rows: list[Row]) -> str:
    """An aligned table whose columns are the keys of the first row."""
    lines = [[name.replace("_", " ") for name in rows[0]]]
    lines += [[one_line(_cell(value)) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def one_line(text: str) -> str:
    """Text of others, as names and configs in a cache are, in one line where no character acts."""
    from kvalign.escape import escape_controls

    return escape_controls(" ".join(text.split()))


def _rows(shipped: tuple[str, ...], row: Callable[[str, Path], Row | None]) -> Iterator[Row]:
    """Shipped and cached folders that `row` has something to say of, each with where it is."""
    found = [(name, "shipped", checkpoints.FOLDER / name) for name in shipped]
    found += [(name, "cached", folder) for name, folder in cached("model")]
    for name, where, folder in found:
        try:
            if facts := row(name, folder):
                yield {"name": name, "where": where, **facts}
        except Exception as error:  # a folder of the cache may hold anything
            log.warning("%s, %s in %s, cannot be read: %s", name, where, folder, error)


def _config(folder: Path) -> dict[str, Any]:
    """The config of a model or an aligner; empty where there is none."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


def _text(data: Any) -> str:
    """What an aligner's config says of the data that a part was trained on."""
    data = data if isinstance(data, dict) else {}
    if "corpus" in data:
        return f"{_cell(data['corpus'])} ({data.get('num_tokens')} tokens)"
    return str(data.get("weights", "not recorded"))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return "" if value is None else str(value)
