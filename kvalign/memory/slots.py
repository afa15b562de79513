"""Tensors whose slots grow: those of a memory, gigabytes that are read here and there.

On Linux large ones lie in pages of 2 MB, where the system has some: a search that reads everywhere
in pages of 4 KB waits for their addresses. What would take more than half of the machine's memory
lies in files without a name, which are gone with the process; but for a sketch, which each search
reads.
"""

import mmap
import os
from contextlib import suppress
from tempfile import TemporaryFile
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from kvalign.foundation.machine import check_disk, total_bytes
from kvalign.foundation.progress import warn_once
from kvalign.models.fetched import cache_dir

LARGE = 2**22
"""Bytes from which a tensor has a mapping of its own: two pages of 2 MB."""
IN_RAM = 0.5
"""Share of the machine's memory that these tensors may take."""
_in_ram = WeakSet[mmap.mmap]()
_on_disk = WeakValueDictionary[int, mmap.mmap]()  # by their addresses


def lengthened(x: Tensor, dim: int, num: int, stays_in_ram: bool = False) -> Tensor:
    """Return x [..., S, ...] with `num` slots along a dimension; new ones are zero. What
    `stays_in_ram` never lies on the disk.

    Raises:
        UserError: there is no room on the disk either.
    """
    if num == x.shape[dim]:
        return x
    sizes = [*x.shape]
    sizes[dim] = num
    num_bytes = x.element_size() * torch.Size(sizes).numel()
    if num_bytes < LARGE or not x.is_cpu or not hasattr(mmap, "MADV_HUGEPAGE"):
        longer = x.new_zeros(sizes)
    else:
        zeros = _mapped(num_bytes, stays_in_ram)
        longer = torch.frombuffer(zeros, dtype=x.dtype).view(sizes)
        if zeros not in _in_ram:
            _on_disk[longer.data_ptr()] = zeros
    longer.narrow(dim, 0, x.shape[dim]).copy_(x)
    return longer


def is_on_disk(x: Tensor) -> bool:
    """Return whether slots, [..., S, ...], lie in a file."""
    return len(_on_disk) > 0 and x.is_cpu and x.untyped_storage().data_ptr() in _on_disk


def _mapped(num_bytes: int, stays_in_ram: bool) -> mmap.mmap:
    """Zeros of so many bytes."""
    most = IN_RAM * (total_bytes() or torch.inf)
    if stays_in_ram or sum(map(len, _in_ram)) + num_bytes <= most:
        zeros = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a system that has none
            zeros.madvise(mmap.MADV_HUGEPAGE)
        _in_ram.add(zeros)
        return zeros
    from rich.filesize import decimal

    folder = cache_dir() / "memories"
    check_disk(num_bytes, folder, "a memory")
    warn_once(
        f"memories take half of this machine's {decimal(int(total_bytes() or 0))}: what is more "
        f"lies on the disk, in {folder}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # or a full disk would kill the process
        zeros = mmap.mmap(file.fileno(), num_bytes)
    zeros.madvise(mmap.MADV_RANDOM)
    return zeros
