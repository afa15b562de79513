"""File of a saved stream's memory, beside the stream's own.

    NAME             the stream; of its memory only where that is
    NAME.memory.0    [ keys and values of one token, in all layers ] x tokens; or NAME.memory.1

A save appends the tokens that are new. What lies behind those that NAME counts is never read, so a
save that is killed changes nothing. If the file has another stream, or more than twice the tokens
of a full memory, a save writes the other of the two files. The first goes once NAME says so.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from zlib import crc32

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvalign.foundation.errors import UserError
from kvalign.foundation.files import make_private

SUMS = "memory.crc32"
"""Tensor of a stream's file: [S] int64, of the record of each stored token."""
DIGESTS = "memory.digests"
"""The same of their digests (`Memories.state`), which tell whether a file has a stream's own."""
_AT_ONCE = 2**22  # bytes
WholeNumber = Annotated[int, Field(strict=True, ge=0)]


class MemoryFile(BaseModel):
    """Place of a stream's memory.

    Attributes:
        number: of the file, 0 or 1.
        first, end: tokens after the sinks, counted from 0: that of the file's first record, and the
            one after the last that counts.
    """

    model_config = ConfigDict(extra="forbid")

    number: Annotated[int, Field(strict=True, ge=0, le=1)]
    first: WholeNumber
    end: WholeNumber


def is_of_memory(name: str) -> bool:
    """Return whether a tensor of a state, by its name, has entries of a memory."""
    return ".memory." in name


def path_of(stream: Path, number: int) -> Path:
    """The file of this number beside a stream's own."""
    return stream.with_name(f"{stream.name}.memory.{number}")


def remove(stream: Path, but: MemoryFile | None = None) -> None:
    """Remove the files beside a stream's own, except one."""
    for number in (0, 1):
        if but is None or number != but.number:
            path_of(stream, number).unlink(missing_ok=True)


class Entries:
    """Stored entries of a memory, as records of tokens of `record_len` bytes.

    Args:
        tensors: [1, H, S, width], keys and values of all layers; the entry of token j is in slot
            j mod S.
        end: the token after the newest.
        digests: [S] int64, of the slots; None: unknown.

    Attributes:
        digests: in the order of tokens.
    """

    def __init__(self, tensors: list[Tensor], end: int, digests: Tensor | None = None):
        self.tensors, self.end = tensors, end
        self.num_slots = tensors[0].shape[2]
        self.first = end - self.num_slots
        self.digests = digests
        if digests is not None:
            self.digests = digests[torch.arange(self.first, end) % self.num_slots]
        self.widths = [*map(_width, tensors)]
        self.record_len = sum(self.widths)

    def spans(self, first: int) -> Iterator[slice]:
        """Slots of the tokens from this one on, in pieces."""
        most = max(1, _AT_ONCE // self.record_len)
        while first < self.end:
            slot = first % self.num_slots
            num = min(most, self.end - first, self.num_slots - slot)
            yield slice(slot, slot + num)
            first += num

    def records(self, slots: slice) -> Tensor:
        """Records [T, bytes] uint8 of some slots."""
        parts = (x[0, :, slots].transpose(0, 1).flatten(1).cpu() for x in self.tensors)
        return torch.cat([x.contiguous().view(torch.uint8) for x in parts], 1)

    def put(self, slots: slice, records: Tensor) -> None:
        """Write records [T, bytes] into some slots."""
        for x, part in zip(self.tensors, records.split(self.widths, 1), strict=True):
            x[0, :, slots] = part.view(x.dtype).unflatten(1, (x.shape[1], -1)).transpose(0, 1)


class Before(NamedTuple):
    """Record in a stream's file of its memory: where it is, its `SUMS` and its `DIGESTS`."""

    file: MemoryFile
    sums: Tensor
    digests: Tensor | None


def write(stream: Path, entries: Entries, before: Before | None) -> tuple[MemoryFile, Tensor]:
    """Write the records that the stream's file does not have yet.

    Returns:
        what it shall say, and its `SUMS` [slots] int64.
    """
    if before is not None and _begins(stream, entries, before):
        file, sums = before.file, before.sums
    else:
        number = 0 if before is None else 1 - before.file.number
        file = MemoryFile(number=number, first=entries.first, end=entries.first)
        sums = torch.empty(0)
        path_of(stream, number).unlink(missing_ok=True)
    new: list[int] = []
    make_private(path_of(stream, file.number))
    with path_of(stream, file.number).open("r+b" if file.end > file.first else "wb") as out:
        out.seek((file.end - file.first) * entries.record_len)
        for slots in entries.spans(file.end):
            records = entries.records(slots)
            new += _sums(records)
            out.write(records.numpy().data)
    sums = torch.cat([sums.long(), torch.tensor(new, dtype=torch.int64)])
    return file.model_copy(update={"end": entries.end}), sums[-entries.num_slots :]


def _begins(stream: Path, entries: Entries, before: Before) -> bool:
    """Return whether the records of a stream's file begin those of a memory, by the digests of all
    that both have; and whether the file has room.
    """
    file, digests = before.file, before.digests
    if entries.digests is None or digests is None or digests.shape != before.sums.shape:
        return False
    first, path = file.end - len(digests), path_of(stream, file.number)
    if not first <= entries.first < file.end <= entries.end:
        return False
    if entries.end - file.first > 2 * entries.num_slots or not path.is_file():
        return False
    if path.stat().st_size < (file.end - file.first) * entries.record_len:
        return False
    ours = entries.digests[: file.end - entries.first]
    return torch.equal(ours, digests[entries.first - first :])


def read(stream: Path, file: MemoryFile, sums: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a stream's memory [1, H, S, width].

    Args:
        sums: `SUMS` of the stream's file.
        like: empty tensors [1, H, 0, width].

    Raises:
        UserError: it is damaged, or of another stream.
    """
    path = path_of(stream, file.number)
    if not path.is_file():
        raise UserError(f"{stream} has its memory in {path}, which is missing: copy both files")
    record_len = sum(map(_width, like))
    if path.stat().st_size < max(1, record_len) * (file.end - file.first):
        raise UserError(f"{path} is damaged: it is shorter than {stream.name} says")
    entries = Entries([x.new_empty(1, x.shape[1], len(sums), x.shape[3]) for x in like], file.end)
    checksums = iter(sums.tolist())
    with path.open("rb") as source:
        source.seek((entries.first - file.first) * record_len)
        for slots in entries.spans(entries.first):
            records = torch.empty(slots.stop - slots.start, record_len, dtype=torch.uint8)
            source.readinto(records.numpy().data)
            if any(crc != next(checksums) for crc in _sums(records)):
                raise UserError(f"{path} is damaged: its checksum differs")
            entries.put(slots, records)
    return entries.tensors


def _width(entries: Tensor) -> int:
    """Bytes of one token in entries [1, H, S, width]."""
    return entries.shape[1] * entries.shape[3] * entries.element_size()


def _sums(records: Tensor) -> list[int]:
    return [crc32(record) for record in records.numpy()]
