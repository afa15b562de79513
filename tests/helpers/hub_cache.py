"""A cache of the hub as huggingface_hub lays it out, made of folders."""

import shutil
from pathlib import Path

COMMIT = "0" * 40


def put_into_cache(cache: Path, name: str, folder: Path, repo_type: str = "model") -> Path:
    """Copy a folder as the main branch of a repository; the place of its files."""
    repo = cache / f"{repo_type}s--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, repo / "snapshots" / COMMIT))
