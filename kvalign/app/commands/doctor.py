"""`kvalign doctor`: versions, devices, our kernel, and the extras that are installed here."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement

from kvalign.foundation.settings import Settings


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Settings):
    """Show versions, devices and which extras are installed on this machine, and how to get the
    rest. kvalign models, aligners and corpora list what there is to use.

    Each thing is ok, missing (KV-Align works without it) or wrong (required and not usable).
    Nothing is fetched. Exit code 1: something is wrong.

    Example:
        kvalign doctor
    """


class Check(NamedTuple):
    name: str
    state: str  # ok, missing or wrong
    about: str


def doctor(settings: DoctorSettings, as_json: bool) -> None:
    checks = [*packages(), *devices(), *extras()]
    wrong = [check.name for check in checks if check.state == "wrong"]
    if as_json:
        print(json.dumps({"fit": not wrong, "checks": [check._asdict() for check in checks]}))
    else:
        from kvalign.foundation.console import print_table

        print_table(["", "", ""], [(check.state, check.name, check.about) for check in checks])
        print(f"wrong: {', '.join(wrong)}" if wrong else "everything required is here")
    if wrong:
        raise SystemExit(1)


def requirements() -> Iterator[tuple[str, Requirement]]:
    """Each package with the first extra that installs it; no extra: it is always needed."""
    names = metadata.metadata("kvalign").get_all("Provides-Extra") or []
    listed = {"kvalign"}  # an extra that includes another
    for text in metadata.requires("kvalign") or ():
        needed = Requirement(text)
        if needed.name in listed:
            continue
        for extra in ("", *(name for name in names if name != "dev")):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                listed.add(needed.name)
                yield extra, needed
                break


def how_to_install(name: str) -> str:
    """The command that installs a package, or the package of a module, in a supported version."""
    for extra, needed in requirements():
        if needed.name.replace("-", "_") == name.replace("-", "_"):
            return f"pip install 'kvalign[{extra}]'" if extra else f"pip install '{needed}'"
    return "pip install 'kvalign[all]'"  # what another package needs, or a module of another name


def _is_in(needed: Requirement) -> tuple[bool, str]:
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return False, "none"
    return needed.specifier.contains(version, prereleases=True), version


def packages() -> Iterator[Check]:
    yield Check("kvalign", "ok", metadata.version("kvalign"))
    python, version = metadata.metadata("kvalign")["Requires-Python"], sys.version.split()[0]
    is_supported = Requirement(f"python{python}").specifier.contains(version)
    yield Check("python", "ok" if is_supported else "wrong", f"{version}, supported is {python}")
    for extra, needed in requirements():
        if not extra:
            is_in, version = _is_in(needed)
            todo = f"{version}, supported is {needed.specifier}: {how_to_install(needed.name)}"
            yield Check(needed.name, *(("ok", version) if is_in else ("wrong", todo)))


def devices() -> Iterator[Check]:
    """The CPU with our kernel, which this builds where it has not been, and graphics cards."""
    try:
        import torch

        from kvalign.models import kernel
    except Exception as error:  # whatever a broken package raises
        yield Check("cpu", "wrong", f"torch cannot be used: {type(error).__name__}: {error}")
        return
    yield Check("cpu", "ok", f"{torch.get_num_threads()} threads")
    ours = "without a CPU with AVX2 and a C++ compiler steps take longer"
    file = kernel.load()
    yield Check("kernel", *(("ok", str(file)) if file else ("missing", ours)))
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    none = f"torch {torch.__version__} sees no GPU"
    yield Check("cuda", *(("ok", ", ".join(cards)) if cards else ("missing", none)))


def extras() -> Iterator[Check]:
    """Each extra with packages of its own."""
    of_extras: dict[str, list[Requirement]] = {}
    for extra, needed in requirements():
        of_extras.setdefault(extra, []).append(needed)
    for extra, needs in of_extras.items():
        lacking = [f"{x.name}{x.specifier}" for x in needs if not _is_in(x)[0]]
        todo = f"{', '.join(lacking)}: pip install 'kvalign[{extra}]'"
        if extra:
            yield Check(f"kvalign[{extra}]", *(("missing", todo) if lacking else ("ok", "")))
