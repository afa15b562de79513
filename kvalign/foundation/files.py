"""Files that exist completely or not at all: they are written under a temporary name beside their
place, then renamed. JSON that is checked when it is read. Folders that only one run writes at a
time. Packed weights, kernels and compiled steps, which are kept and read only if their checksum
holds.
"""

import hashlib
import json
import os
import reprlib
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from kvalign.foundation.errors import NotFoundError, RunError, UserError, is_of_a_path
from kvalign.foundation.progress import warn_once

if TYPE_CHECKING:
    from pydantic import BaseModel

LOCK = ".lock"
PRIVATE = 0o600
TEXT = "utf-8-sig"  # the encoding of text files; the mark with which some begin is no text

# Of values from outside: a text of a few lines can stand for a list of 10^10 numbers.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200

M = TypeVar("M", bound="BaseModel")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, or a folder, under a temporary name, then rename it, in a folder
    that is made if need be. An interrupted write leaves nothing behind; the leftovers of a killed
    one are removed by the next.

    Raises:
        OSError: the file could not be written (disk full, no permission), whatever exception
            `write` raised.
    """
    write_together(path.parent, lambda partial: write(partial / path.name), path.name)


def write_together(folder: Path, write: Callable[[Path], object], last: str) -> None:
    """Let `write` fill a temporary folder with files, then move them into `folder`. The file named
    `last` marks completeness: it is moved when all others are in place. Until all are written an
    interruption leaves the old files; after that the new ones.

    Raises:
        OSError: as of `write_whole`.
    """
    # A folder, because some writers (safetensors) have temporary files of their own beside a file.
    partial, ready = _unfinished(folder, last)
    is_new = not folder.exists()
    try:
        _settle(folder, last)  # what a killed run left
        partial.mkdir(parents=True)
        write(partial)
        os.replace(partial / last, ready)
    except RunError:
        raise
    except (SafetensorError, RuntimeError) as error:  # safetensors' and torch.save's own
        raise OSError(f"cannot write {folder / last}: {error}") from error
    finally:
        try:
            _settle(folder, last)
        except OSError:
            _remove((partial, ready))
            raise
        except BaseException:
            _settle(folder, last)  # Ctrl-C in the middle of a move
            raise
        finally:
            if is_new:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def _unfinished(folder: Path, last: str) -> tuple[Path, Path]:
    """The temporary folder of files, and where the last of them is once all are written."""
    return folder / f".{last}.partial", folder / f".{last}.partial.last"


def _settle(folder: Path, last: str) -> None:
    """Move files that were all written into place, and remove others: the old files or the new."""
    partial, ready = _unfinished(folder, last)
    if ready.exists():
        others = [*partial.iterdir()] if partial.is_dir() else []
        if others:
            (folder / last).unlink(missing_ok=True)  # it is of other files
        for path in others:
            os.replace(path, folder / path.name)
    _remove((partial,))
    if ready.exists():
        os.replace(ready, folder / last)


def make_private(path: Path) -> None:
    """Let only its owner read and write a file, new or not, which holds what somebody said."""
    path.touch(PRIVATE)
    path.chmod(PRIVATE)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text completely or not at all."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, values: Any) -> None:
    """Write JSON values, indented, completely or not at all."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def read_text(path: Path) -> str:
    """The text of a file, as of `text_of`.

    Raises:
        NotFoundError: it does not exist.
        UserError: it is a folder, a pipe or a device, which may have no end, or is not UTF-8.
    """
    if not path.exists():
        raise NotFoundError(f"there is no file {path}")
    if not path.is_file():
        raise UserError(f"{path} is not a file but {'a folder' if path.is_dir() else 'a pipe'}")
    return text_of(path.read_bytes(), path)


def text_of(content: bytes, source: object) -> str:
    """The UTF-8 text of a file or a pipe, with \\n at the ends of lines; UserError for another."""
    try:
        text = content.decode(TEXT)
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError, naming the file, if it has none."""
    values = parse_json(read_text(path), path)
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values


def parse_json(text: str, where: object) -> Any:
    """The values in a JSON text from outside; UserError, beginning with `where`, if invalid."""
    try:
        values = json.loads(text)
        if "\\ud" in text.lower():  # a half of a character is no text, wherever it would go
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    return values


def checked(model: type[M], values: Any, where: object) -> M:
    """Values from JSON or YAML as a pydantic model. One of a file of ours has a field `format`: the
    number that this version writes, and the only one that it reads.

    Raises:
        UserError: another format; what is missing, unknown or wrong, by field; it begins with
            `where`.
    """
    from pydantic import ValidationError

    if (own := model.model_fields.get("format")) and isinstance(values, dict):
        number = values.get("format")
        if type(number) is not int or number != own.default:
            raise UserError(
                f"{where} has format {_SHORT.repr(number):.80}, and this version of kvalign reads "
                f"{own.default}: make it again"
            )
    try:
        return model.model_validate(values)
    except RecursionError:
        raise UserError(f"{where} is nested too deep") from None
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False, include_context=False)[:3]:
            field = ".".join(map(str, fault["loc"]))
            field = f"{field if field.isprintable() else repr(field):.80}"
            value = "" if fault["type"] == "missing" else f", got {_SHORT.repr(fault['input']):.80}"
            faults.append(f"{field or 'it'}: {fault['msg']}{value}")
        raise UserError(f"{where}: {'; '.join(faults)}") from None


def read_checked(model: type[M], path: Path) -> M:
    """The JSON object in a file as a pydantic model; UserError as of `read_json` and `checked`."""
    return checked(model, read_json(path), path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path, summary: Callable[[], str] = str) -> Iterator[None]:
    """Folder, made if need be, that no other run writes to. The lock of a killed run is free, and
    its unfinished files are removed.

    A run that is refused within (UserError, an impossible path, a missing package) leaves nothing
    of its own, not even the folder, unless `summary` names something useful in it.

    Raises:
        UserError: another run is writing to it.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    with lock_file(folder / LOCK, folder):
        try:
            _remove([*folder.rglob(".*.partial*")])
            yield
        except (UserError, ModuleNotFoundError, OSError) as error:
            # Where nothing is said of what is kept, a full disk leaves what there is.
            is_refused = not isinstance(error, OSError) or is_of_a_path(error)
            if (is_refused or summary is not str) and not summary():
                _remove(set(folder.iterdir()) - before)
                with suppress(OSError):
                    for path in new_folders:
                        path.rmdir()
            raise


@contextmanager
def lock_file(lock: Path, what: Path) -> Iterator[None]:
    """Hold the lock of a file; UserError if another run, which writes to `what`, has it."""
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        remedy = "wait for it, or name another folder"
        raise UserError(f"another run is writing to {what}: {remedy}") from None
    with held:
        yield


def check_not_locked(folder: Path) -> None:
    """Raise UserError if a running command has the folder `locked`."""
    if (folder / LOCK).exists():
        with lock_file(folder / LOCK, folder):
            pass


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# What is kept in the user's cache folder to save the time of making it: NAME.EXT, whose name has a
# digest of all that it was made of, beside NAME.json with its checksum.
_AT_ONCE = 2**20  # bytes, which stay in the processor's cache


def checksum(path: Path) -> str:
    """CRC-32 of a file (4 GB/s) and its length."""
    crc, size, buffer = 0, 0, memoryview(bytearray(_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:num], crc), size + num
    return f"{crc:08x}-{size}"


def is_whole(file: Path) -> bool:
    """Return whether a kept file is there as it was written."""
    try:
        if not file.exists():
            return False
        if read_json(_about(file))["checksum"] == checksum(file):
            return True
    except (UserError, KeyError, OSError):
        pass
    warn_once(f"{file} is damaged: it is made again, not read")
    return False


def keep(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under a temporary name, then keep it; OSError where it cannot."""

    def write_both(partial: Path) -> None:
        write(partial / file.name)
        write_json(partial / _about(file).name, {"checksum": checksum(partial / file.name)})

    write_together(file.parent, write_both, _about(file).name)


@contextmanager
def being_made(file: Path) -> Iterator[None]:
    """Context in which no other process makes this file; OSError where it cannot be kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_lock(file)):
        yield


def forget(file: Path) -> None:
    for path in (_about(file), file, _lock(file)):
        path.unlink(missing_ok=True)


def _about(file: Path) -> Path:
    return file.with_suffix(".json")


def _lock(file: Path) -> Path:
    return file.with_name(f".{file.stem}.lock")
