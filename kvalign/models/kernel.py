"""The product of rows with packed weights that rounds its inputs to 8 bits, as llama.cpp's does: a
C++ file (`packed_product.cpp`) that this machine's compiler builds once, into the user's cache
folder. It needs AVX-512 VNNI, and PyTorch 2.10.

Weights lie as a step reads them, one stretch of memory: [blocks of 16 outputs, groups of 32 inputs,
bytes]. The bytes of a group are its q, by fours of inputs, then s and z in bfloat16; those of 8 bits
have no z. Of 4 bits, eight inputs are 64 bytes: the first four of each output in the low halves.
"""

import ctypes
import functools
import hashlib
import logging
import subprocess
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.functional import pad

from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_json, sha256, write_json, write_together
from kvalign.models.fetched import cache_dir

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("packed_product.cpp")
SHIM = (
    "AOTITorchError aoti_torch_cpu_packed_product"
    "(AtenTensorHandle rows, AtenTensorHandle packed, int64_t num_out, AtenTensorHandle* result)"
)
"""How compiled steps call it, without a dispatcher."""
_FLAGS = "-O3 -std=c++17 -fPIC -shared -mavx512f -mavx512bw -mavx512vl -mavx512vnni -mfma".split()
_GROUP, _BLOCK = 32, 16


@functools.cache
def is_here() -> bool:
    """Return whether the product can be had: the op `kvalign::packed_product` is then known. Where
    the CPU has it and nothing can be built, a line is logged, once.
    """
    if not torch.cpu.get_capabilities().get("avx512_vnni"):
        return False
    key = hashlib.sha256(f"{SOURCE.read_text()} {_FLAGS} {torch.__version__}".encode())
    file = cache_dir() / "kernels" / f"{key.hexdigest()[:32]}.so"
    try:
        if not _is_whole(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock")):  # another start may be building it
                if not _is_whole(file):
                    _build(file)
        _define()
        ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)  # compiled steps look it up by its name
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("products of packed weights are PyTorch's own: %s", error)
        return False
    return True


def _is_whole(file: Path) -> bool:
    try:
        return bool(read_json(file.with_suffix(".json"))["sha256"] == sha256(file))
    except (UserError, KeyError, OSError):
        return False


def _build(file: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    progress.phase("building the product of packed weights, once")
    torch_dir, about = Path(torch.__file__).parent, file.with_suffix(".json")
    libraries = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]

    def write(partial: Path) -> None:
        made = partial / file.name
        command = [get_cpp_compiler(), *_FLAGS, f"-I{torch_dir / 'include'}", str(SOURCE)]
        subprocess.run([*command, "-o", str(made), *libraries], check=True, capture_output=True)
        write_json(partial / about.name, {"sha256": sha256(made)})

    write_together(file.parent, write, about.name)


@functools.cache
def _define() -> torch.library.Library:
    """The op, with what it gives for tensors that have no data."""
    library = torch.library.Library("kvalign", "DEF")
    library.define("packed_product(Tensor rows, Tensor packed, int num_out) -> Tensor")

    def shape_of(rows: Tensor, packed: Tensor, num_out: int) -> Tensor:
        return rows.new_empty(rows.shape[0], num_out)

    torch.library.register_fake("kvalign::packed_product", shape_of, lib=library)
    return library


def product(rows: Tensor, packed: Tensor, num_out: int) -> Tensor:
    """Rows [M, K] times packed weights: [M, num_out], both in float32; a row's result does not
    depend on the others.
    """
    return torch.ops.kvalign.packed_product(rows.contiguous(), packed, num_out)


def packed_of(q: Tensor, scales: Tensor) -> Tensor:
    """Weights as they lie.

    Args:
        q: [N, K] uint8, of 0 to 15 or, where z is missing, of 0 to 255.
        scales: [N, K / 32, 2 or 1] bfloat16: s, and z.

    Returns:
        [blocks of 16 outputs, K / 32, bytes] uint8, filled up with zeros.
    """
    missing = -len(q) % _BLOCK
    q, scales = pad(q, (0, 0, 0, missing)), pad(scales, (0, 0, 0, 0, 0, missing))
    fours = q.view(-1, _BLOCK, q.shape[1] // _GROUP, 8, 4).permute(0, 2, 3, 1, 4)
    if scales.shape[2] == 2:
        fours = fours[:, :, ::2] | fours[:, :, 1::2] << 4
    after = scales.unflatten(0, (-1, _BLOCK)).permute(0, 2, 3, 1).contiguous()
    return torch.cat([fours.flatten(2), after.view(torch.uint8).flatten(2)], 2)


def parts_of(packed: Tensor, num_out: int) -> tuple[Tensor, Tensor]:
    """What `packed_of` was given."""
    num_scales = 2 if packed.shape[2] == 320 else 1
    fours, after = packed.split([packed.shape[2] - 32 * num_scales, 32 * num_scales], 2)
    fours = fours.unflatten(2, (-1, _BLOCK, 4))
    if num_scales == 2:
        fours = torch.stack([fours & 15, fours >> 4], 3).flatten(2, 3)
    q = fours.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
    after = after.contiguous().view(torch.bfloat16).unflatten(2, (num_scales, _BLOCK))
    return q[:num_out], after.permute(0, 3, 1, 2).flatten(0, 1)[:num_out]
