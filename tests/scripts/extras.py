"""Every module of a wheel imports with the packages of its extra alone, and of nothing else; and
commands that need no extra run without one.

    python tests/scripts/extras.py build/wheel/kvalign-0.2.0-py3-none-any.whl

For each extra, a folder with links to the installed packages that it brings, and to those that
these need, stands in for a fresh environment.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Which extra a module needs, by the longest prefix; the core and what of the application needs no
# more stand under "".
EXTRA_OF = {
    "kvalign": "",
    "kvalign.data_gen": "data",
    "kvalign.training": "train",
    "kvalign.training.sweep": "tune",
    "kvalign.eval": "eval",
    "kvalign.app.commands.eval_run": "eval",
    "kvalign.app.serve": "serve",
}

OF_CUDA = {"kvalign.models.triton_kernel"}
"""Modules that need what PyTorch for CUDA alone brings; who imports them goes without."""

BARE = (
    *(["doctor"], ["models"], ["list"]),
    ["lanes", "--out", "{place}/lanes.html"],
    ["generate", "--model", "gpt2-mini", "--max-new-tokens", "3", "--prompt", "The"],
)
"""Commands without an extra."""
RUN = """
import sys
sys.path[:0] = {path!r}
from kvalign.app.cli.main import main
sys.exit(main({words!r}))
"""
IMPORT_ALL = """
import importlib, sys
sys.path[:0] = {path!r}
for name in {names!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{{name}}: {{type(error).__name__}}: {{error}}")
"""


def modules(wheel: Path) -> list[str]:
    """Modules in a wheel but `OF_CUDA`, `__main__` left out: importing it runs it."""
    with zipfile.ZipFile(wheel) as archive:
        files = [Path(name) for name in archive.namelist() if name.endswith(".py")]
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    return sorted(name for name in names - OF_CUDA if not name.endswith("__main__"))


def extra_of(module: str) -> str:
    prefixes = [p for p in EXTRA_OF if module == p or module.startswith((f"{p}.", f"{p}_"))]
    return EXTRA_OF[max(prefixes, key=len)]


def needed(requirements: list[str], extras: frozenset[str], seen: set[str]) -> Iterator[str]:
    """Installed packages that requirements bring, with these extras of theirs, each once."""
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}
        ):
            continue
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in seen or name == "kvalign":
            continue
        seen.add(key)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        yield name
        wanted = frozenset(requirement.extras) | {""}
        yield from needed(package.requires or [], wanted, seen)


def link(packages: set[str], folder: Path) -> None:
    """A folder with what these packages installed, by links."""
    for name in packages:
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            place = folder / top
            if not place.exists() and top != "__pycache__":
                place.symlink_to(package.locate_file(top))


def own_extras(requirements: list[str], extra: str) -> frozenset[str]:
    """An extra and those that it includes: `kvalign[data]; extra == "train"`."""
    extras, before = {extra, ""}, set[str]()
    while extras != before:
        before = set(extras)
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            if requirement.name == "kvalign" and any(marker.evaluate({"extra": e}) for e in before):
                extras |= requirement.extras
    return frozenset(extras)


def main(wheel: Path) -> int:
    with tempfile.TemporaryDirectory() as place:
        unpacked = Path(place, "wheel")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        (about,) = importlib.metadata.distributions(name="kvalign", path=[str(unpacked)])
        requirements = about.requires or []
        failures = []
        for extra in dict.fromkeys(EXTRA_OF.values()):
            names = [name for name in modules(wheel) if extra_of(name) == extra]
            assert names, f"no module needs {extra!r}: mend EXTRA_OF"
            site = Path(place, f"site-{extra}")
            site.mkdir()
            link(set(needed(requirements, own_extras(requirements, extra), set())), site)
            code = IMPORT_ALL.format(path=[str(unpacked), str(site)], names=names)
            # Neither this environment's packages nor the folder it runs in.
            command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", code]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = done.stdout.splitlines() + done.stderr.splitlines()[-1:] * bool(done.returncode)
            failures += [f"[{extra}] {line}" for line in lines]
            for words in BARE if not extra else ():
                words = [word.format(place=place) for word in words]
                code = RUN.format(path=[str(unpacked), str(site)], words=words)
                done = subprocess.run([*command[:-1], code], capture_output=True, text=True)
                failures += [f"kvalign {words[0]}: {done.stderr}"] * bool(done.returncode)
            print(f"kvalign[{extra}]: {len(names)} modules, {len(list(site.iterdir()))} packages")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
