"""`kvalign doctor`: what is installed, reachable and available on this machine: packages, devices,
the hub and its cache, models, aligners, corpora and word lists. It fetches and changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from kvalign import checkpoints
from kvalign.app import listing
from kvalign.foundation import hub
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import free_bytes, size
from kvalign.foundation.settings import Settings
from kvalign.models import fetched


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Settings):
    """Show what is installed, reachable and available on this machine, and how to get the rest.

    Each thing is ok, missing (KV-Align works without it) or wrong (present but unusable). Nothing
    is fetched. Exit code 1: something required is missing or wrong.

    Example:
        kvalign doctor
    """


def doctor(settings: DoctorSettings, as_json: bool) -> None:
    checks = examine()
    if as_json:
        print(json.dumps({"fit": is_fit(checks), "checks": list(map(asdict, checks))}))
    else:
        show(checks)
    if not is_fit(checks):
        raise SystemExit(1)


def show(results: list[Check]) -> None:
    """Print a table for each group, and a summary line. States are words, not only colours."""
    from kvalign.foundation.console import Heading, print_table

    headings: list[Heading | str] = [
        Heading(min_width=len("missing")),
        Heading(min_width=max(len(check.name) for check in results)),
        "",
    ]
    for group, members in groupby(results, lambda check: check.group):
        rows = [[check.state, check.name, check.message] for check in members]
        print_table(headings, rows, title=group)
        print()
    not_ok = [check for check in results if check.state != "ok"]
    required = [check.name for check in not_ok if check.required]
    fit = "everything required is here"
    if required:
        fit = f"required, but not ok: {', '.join(required)}"
    print(f"{fit}; optional, but not ok: {len(not_ok) - len(required)}")


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    group: str = field(default="", kw_only=True)  # its heading; empty: its part's
    name: str
    state: Literal["ok", "missing", "wrong"]  # missing: it could be had; wrong: it cannot be used
    found: str  # or what is wrong
    todo: str = ""  # empty where all is well
    required: bool = False  # whether KV-Align cannot work without it

    @property
    def message(self) -> str:
        """The result in words, and the remedy."""
        return f"{self.found}: {self.todo}" if self.todo else self.found


def requirements() -> Iterator[tuple[str, Requirement]]:
    """Each package with the first extra that installs it; no extra: it is always needed."""
    extras = metadata.metadata("kvalign").get_all("Provides-Extra") or []
    listed = {"kvalign"}  # an extra that includes another
    for text in metadata.requires("kvalign") or ():
        needed = Requirement(text)
        if needed.name in listed:
            continue
        for extra in ("", *(extra for extra in extras if extra != "dev")):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                listed.add(needed.name)
                yield extra, needed
                break


def installed(name: str) -> str | None:
    """The version of a package that is installed here, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def how_to_install(name: str) -> str:
    """The command that installs a package, or the package of a module, in a supported version."""
    for extra, needed in requirements():
        if needed.name.replace("-", "_") == name.replace("-", "_"):
            return f"pip install 'kvalign[{extra}]'" if extra else f"pip install '{needed}'"
    return "pip install 'kvalign[all]'"  # what another package needs, or a module of another name


def packages() -> Iterator[Check]:
    """Python, then every required package, by the extra that installs it."""
    package = metadata.metadata("kvalign")
    yield Check("kvalign", "ok", package["Version"], required=True)
    python = Requirement(f"python{package['Requires-Python']}")
    yield _version(python, sys.version.split()[0], "install a supported Python")
    for extra, needed in requirements():
        check = _version(needed, installed(needed.name), how_to_install(needed.name))
        if extra:
            check = replace(check, group=f"packages of kvalign[{extra}]", required=False)
        yield check


def _version(needed: Requirement, version: str | None, todo: str) -> Check:
    if version is None:
        return Check(needed.name, "missing", "not installed", todo, required=True)
    if not needed.specifier.contains(version, prereleases=True):
        about = f"{version}, supported is {needed.specifier}"
        return Check(needed.name, "wrong", about, todo, required=True)
    return Check(needed.name, "ok", version, required=True)


def devices() -> Iterator[Check]:
    import torch

    count, threads = os.cpu_count(), torch.get_num_threads()
    yield Check("cpu", "ok", f"{count} cores, {threads} threads", required=True)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Check(f"cuda:{index}", "ok", f"{device.name}, {size(device.total_memory)}")
    elif torch.version.cuda:
        todo = "see if nvidia-smi lists one; cpu works without"
        yield Check("cuda", "missing", "torch sees no such device", todo)
    else:
        todo = "with an NVIDIA GPU, install torch's CUDA build (pytorch.org); cpu works without"
        yield Check("cuda", "missing", f"torch {torch.__version__} has no CUDA", todo)
    if torch.backends.mps.is_available():
        yield Check("mps", "ok", "Apple GPU")
    elif sys.platform == "darwin":
        todo = "it needs macOS 12.3 on Apple silicon; cpu works without"
        yield Check("mps", "missing", "torch sees no such device", todo)


def machine() -> Iterator[Check]:
    disk = shutil.disk_usage(Path.cwd())
    yield Check("disk", "ok", f"{size(disk.free)} free here of {size(disk.total)}")
    if (num_bytes := free_bytes()) is not None:
        yield Check("memory", "ok", f"{size(num_bytes)} free here")


def hub_and_cache() -> Iterator[Check]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    if hub.is_reachable():
        yield Check("hub", "ok", constants.ENDPOINT)
    else:
        off = "is off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "does not answer"
        todo = "connect, or use folders and everything that is ok below"
        yield Check("hub", "missing", f"{constants.ENDPOINT} {off}", todo)
    try:
        used = size(scan_cache_dir(constants.HF_HUB_CACHE).size_on_disk)
    except CacheNotFound:
        used = "empty"
    yield Check("cache", "ok", f"{constants.HF_HUB_CACHE}: {used} (HF_HOME moves it)")


def models() -> Iterator[Check]:
    rows = listing.models()
    yield from _at_hand(checkpoints.MODELS, rows, "{architecture}, {positions} positions")
    for name in sorted(set(fetched.MODELS) - {row["name"] for row in rows}):
        source, todo = fetched.MODELS[name], fetched.how_to_fetch(name)
        where = f"not in {fetched.cache_dir()} ({fetched.MOVED_BY} moves it)"
        yield Check(name, "missing", where, f"{todo} ({source.size}, {source.licence})")
    if not any(row["where"] == "cached" for row in rows):
        todo = "--model HUB_ID fetches one; kvalign models lists the architectures"
        yield Check("from the hub", "missing", "none in the cache", todo)


def aligners() -> Iterator[Check]:
    return _at_hand(checkpoints.ALIGNERS, listing.aligners(), "{label} for {base_model}")


def corpora() -> Iterator[Check]:
    from kvalign.data_gen.corpora import SPECS
    from kvalign.data_gen.corpus import HUB
    from kvalign.data_gen.python_texts import python_docs

    next(python_docs("train"))
    yield Check("python-docs", "ok", SPECS["python-docs"])
    in_cache = dict(listing.cached("dataset"))
    for name, corpus in HUB.items():
        if not installed("datasets"):
            todo = how_to_install("datasets")
            yield Check(name, "missing", "datasets is not installed", todo)
        elif Path(corpus.name).is_dir():
            yield Check(name, "ok", f"in the folder {corpus.name}")
        elif hub.is_reachable():
            yield Check(name, "ok", corpus.about)
        elif copy := in_cache.get(corpus.name):
            yield Check(name, "ok", f"in the hub's cache ({copy})")
        else:
            todo = f"put a copy into ./{corpus.name}, or use python-docs or text:PATH"
            yield Check(name, "missing", "the hub cannot be reached", todo)


def word_lists() -> Iterator[Check]:
    from kvalign.eval.judging.words import NAME, load_words

    package = "english-words"
    if not installed(package):
        yield Check(NAME, "missing", f"{package} is not installed", how_to_install(package))
        return
    try:
        yield Check(NAME, "ok", f"SHA-256 {load_words().sha256}")
    except UserError as error:
        problem, _, todo = str(error).partition(": ")
        yield Check(NAME, "wrong", problem, todo)


def _at_hand(shipped: tuple[str, ...], rows: list[listing.Row], about: str) -> Iterator[Check]:
    """Return the shipped items that cannot be read, and each row in words."""
    for name in sorted(set(shipped) - {row["name"] for row in rows}):
        yield Check(
            name, "wrong", "shipped, but its files cannot be read", "reinstall kvalign", True
        )
    for row in rows:
        yield Check(row["name"], "ok", f"{row['where']}, {about.format(**row)}")


# A group's name, its checks, and whether KV-Align cannot work where a check itself fails.
_PARTS: tuple[tuple[str, Callable[[], Iterator[Check]], bool], ...] = (
    ("packages", packages, True),
    ("devices", devices, True),
    ("machine", machine, False),
    ("hub", hub_and_cache, False),
    ("models", models, True),
    ("aligners", aligners, True),
    ("corpora", corpora, False),
    ("word lists", word_lists, False),
)


def examine() -> list[Check]:
    """The checks of every part. A part that fails becomes a check of its own."""
    results: list[Check] = []
    for group, look, required in _PARTS:
        try:
            results += (replace(check, group=check.group or group) for check in look())
        except Exception as error:  # whatever a broken package raises when it is used
            fault = f"{type(error).__name__}: {error}"
            todo = "install or correct what is missing or wrong above"
            results.append(Check(group, "wrong", fault, todo, required, group=group))
    return results


def is_fit(results: list[Check]) -> bool:
    """Return whether everything required is present and usable."""
    return all(check.state == "ok" for check in results if check.required)
