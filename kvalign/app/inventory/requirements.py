"""The packages that KV-Align needs, from its metadata (pyproject.toml)."""

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

_UNLISTED = ("dev",)  # an extra for work on KV-Align itself


def requirements() -> Iterator[tuple[str, Requirement]]:
    """Each package with the first extra that brings it; no extra: it is always needed."""
    extras = metadata.metadata("kvalign").get_all("Provides-Extra") or []
    listed = {"kvalign"}  # an extra that includes another
    for text in metadata.requires("kvalign") or ():
        needed = Requirement(text)
        if needed.name in listed:
            continue
        for extra in ("", *(extra for extra in extras if extra not in _UNLISTED)):
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
    """The command that installs a package, or the module of one, in a version that is supported."""
    for extra, needed in requirements():
        if needed.name.replace("-", "_") == name.replace("-", "_"):
            return f"pip install 'kvalign[{extra}]'" if extra else f"pip install '{needed}'"
    return "pip install 'kvalign[all]'"  # what another package needs, or a module of another name
