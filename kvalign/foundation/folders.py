"""Default folders for output, below the one in which a command runs.

    kvalign-data/MODEL/caches   recordings of a model by `kvalign gen-data`
    kvalign-data/MODEL/KIND     its aligner of a kind, by `kvalign train`
    kvalign-data/MODEL/sweep-KV a sweep by `kvalign tune`

A name contains the corpus unless that is the default: `caches-wikitext`, `table-wikitext`. MODEL is
the last part of the model's name: `distilgpt2` of `distilbert/distilgpt2`, `my-model` of
`files/my-model.gguf`.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("kvalign-data")
RECORDING, MANIFEST = "caches", "manifest.json"
DEFAULT_CORPUS = ("python-docs",)
_MOST_CHARS = 80  # of a corpus in a folder's name


def folder_of(model: str) -> Path:
    """Folder for the outputs of a model, given its name or its own folder."""
    return ROOT / os.path.basename(os.path.abspath(model)).removesuffix(".gguf")


def of_corpus(name: str, corpus: Sequence[str]) -> str:
    """Folder name with the corpus, unless that is the default."""
    if tuple(corpus) == DEFAULT_CORPUS:
        return name
    return f"{name}-{as_file_name('-'.join(corpus))[:_MOST_CHARS].strip('-')}"


def as_file_name(text: str) -> str:
    """A text as a part of a file's name: of letters, digits and `._-`."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)


def beside(recording: Path, name: str) -> Path:
    """Folder of a name beside a recording, with the corpus if the recording's name has it."""
    _, _, corpus = recording.name.partition(f"{RECORDING}-")
    return recording.parent / "-".join(filter(None, [name, corpus]))


def recording_or_default(data: Path | None, model: str) -> Path:
    """Folder of a recording: the named one, the newest of a model, or the default."""
    if data is not None:
        return data
    manifests = newest_first(model, MANIFEST)
    return manifests[0].parent if manifests else folder_of(model) / RECORDING


def newest_first(model: str, file_name: str) -> list[Path]:
    """Files of a name in the folders inside a model's folder, the newest first."""
    paths = folder_of(model).glob(f"*/{file_name}")
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
