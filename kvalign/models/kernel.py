"""Kernels of a decode step, in C++ (`kernel.cpp`) that this machine's compiler builds once, into
the user's cache folder: the product of rows with packed weights, which rounds its inputs to 8 bits
as llama.cpp's does, attention of one query of each row, the search of a memory, and attention to
what it finds. They need AVX2 and PyTorch 2.10, and are faster with AVX-512 VNNI. On CUDA we attend
in Triton (`triton_kernel.py`).
"""

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvalign.foundation import files, progress
from kvalign.foundation.progress import warn_once
from kvalign.models.fetched import cache_dir
from kvalign.models.rope import Angles, Rotation, RotationByLayer

log = logging.getLogger(__name__)

_HEADERS = ("alike", "attention", "best", "scores", "search", "sketch", "vectors")
SOURCES = [Path(__file__).with_name(x) for x in ("kernel.cpp", *(f"{x}.h" for x in _HEADERS))]
DIMS = (16, 32, 64, 80, 96, 128)  # of heads that `attend` takes
_SHIMS = {
    "packed_product": "AtenTensorHandle, AtenTensorHandle, int64_t, AtenTensorHandle*",
    "attend": f"{'AtenTensorHandle, ' * 13}double, int64_t, AtenTensorHandle*, AtenTensorHandle*",
}
"""Arguments of the functions that compiled steps call, past the dispatcher."""
_TABLES = ("key_means", "value_means", "key_scales", "value_scales")
_ATTENDED = (
    *("places", "query", "keys", "values", "angles", "bases", "asking", *_TABLES),
    *("beside", "of_beside"),
)
_WRITTEN = (
    *("slot", "new_keys", "new_values", "new_places", "hidden_weight", "hidden_bias"),
    *("key_weight", "key_bias", "value_weight", "value_bias"),
)
_SEARCHED = (
    *("queries", "keys", "values", "bases", "turn", "numbers", "scales", "fine"),
    *("means", "mean_scales", "spreads", "is_ordered"),
    *("worths", "newest", "since", "oldest", "key_bases", "cosines", "sines"),
)
_PLACING = (*_TABLES, "angles", "far", "age_bias", "now")
_FITS = {
    "AVX512": ("avx512_f", "avx512_bw", "avx512_vl", "avx512_vnni", "fma3"),
    "AVX2": ("avx2", "fma3", "f16c"),
}
"""What a CPU must have, by PyTorch's names; the first that fits is taken."""
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")  # rounds as PyTorch does
_NONE = torch.empty(1, 2, 0, 0)


def is_here() -> bool:
    """Return whether the kernels can be had: the ops of `kvalign` are then known."""
    return load() is not None


@functools.cache
def load() -> Path | None:
    """The file of the kernels, built if need be, once it is loaded; None where they cannot be had.
    Where the CPU is fit and nothing can be built, a line is logged, once.
    """
    if (needed := _instruction_sets()) is None:
        return None
    text = "".join(path.read_text() for path in SOURCES)
    key = hashlib.sha256(f"{text} {_FLAGS} {needed} {torch.__version__}".encode())
    file = cache_dir() / "kernels" / f"kernel-{key.hexdigest()[:32]}.so"
    try:
        if not files.is_whole(file):
            with files.being_made(file):  # another start may be building it
                if not files.is_whole(file):
                    _build(file, needed)
        _define()
        ctypes.CDLL(str(file))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        has_compiler = isinstance(error, OSError) and error.errno is not None
        say = warn_once if has_compiler else log.info  # a folder that cannot be written, say
        say(f"steps use PyTorch's own kernels: {error}")
        return None
    return file


def _instruction_sets() -> tuple[str, ...] | None:
    """Instruction sets to build for, at most `ATEN_CPU_CAPABILITY`; None for another CPU."""
    has, most = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability()
    for name, needed in _FITS.items():
        if all(has.get(one) for one in needed) and most in ("AVX512", name):
            return needed
    return None


def _build(file: Path, needed: Sequence[str]) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    progress.phase("building kernels for this CPU, once")
    torch_dir = Path(torch.__file__).parent
    libraries = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]

    def write(library_file: Path) -> None:
        sets = (x.replace("_", "").replace("fma3", "fma") for x in needed)
        flags = [*_FLAGS, *(f"-m{x}" for x in sets), f"-Wl,-soname,{file.name}"]
        command = [get_cpp_compiler(), *flags, f"-I{torch_dir / 'include'}", str(SOURCES[0])]
        subprocess.run(
            [*command, "-o", str(library_file), *libraries], check=True, capture_output=True
        )

    files.keep(file, write)


@functools.cache
def _define() -> torch.library.Library:
    """The ops, with what they give for tensors that have no data."""
    library = torch.library.Library("kvalign", "DEF")
    of_attention = ", ".join(f"Tensor {name}" for name in _ATTENDED)
    is_written = {"keys": "(a!)", "values": "(b!)"}
    of_both = (f"Tensor{is_written.get(name, '')} {name}" for name in _ATTENDED + _WRITTEN)
    of_search = ", ".join(f"Tensor {name}" for name in _SEARCHED + _PLACING)
    nums = "near, num_blocks, num_estimated, num_scored, num_compared, num_recalled"
    nums += ", first, most_apart, room, are_on_disk"
    of_search += "".join(f", int {name}" for name in nums.split(", ")) + ", float alike, float bias"
    for schema in (
        "packed_product(Tensor rows, Tensor packed, int num_out) -> Tensor",
        f"attend({of_attention}, float scale, int num_sinks) -> (Tensor, Tensor)",
        f"find({of_search}) -> ({', '.join(['Tensor'] * 6)})",
        f"write_and_attend({', '.join(of_both)}, float scale, int num_sinks) -> (Tensor, Tensor)",
        "alike_first(Tensor keys) -> Tensor",
        "write_sketch(Tensor keys, Tensor turn, Tensor slots, Tensor(a!) numbers, "
        "Tensor(b!) scales, Tensor(c!) fine, int first) -> ()",
    ):
        library.define(schema)

    def packed_product(rows: Tensor, packed: Tensor, num_out: int) -> Tensor:
        return rows.new_empty(rows.shape[0], num_out)

    def attend(places: Tensor, query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        num_rows, num_heads, _, head_dim = query.shape
        return query.new_empty(num_rows, 1, num_heads, head_dim), query.new_empty(query.shape[:2])

    def find(queries: Tensor, keys: Tensor, *others: Any) -> tuple[Tensor, ...]:
        num_found, first = others[-7:-5]
        shape = (*keys.shape[:2], queries.shape[3], num_found if first < 0 else 0)
        entries = [queries.new_empty(*shape, queries.shape[4]) for _ in range(2)]
        ages, visible = (keys.new_empty(shape, dtype=x) for x in (torch.int64, torch.bool))
        seen = queries[:, :, : queries.shape[2] if first >= 0 else 0]
        return *entries, ages, visible, torch.empty_like(seen), queries.new_empty(seen.shape[:4])

    for shape_of in (packed_product, attend, find):
        torch.library.register_fake(f"kvalign::{shape_of.__name__}", shape_of, lib=library)
    torch.library.register_fake("kvalign::write_and_attend", attend, lib=library)
    return library


def inductor_configs() -> dict[str, Any]:
    """Settings by which steps compiled ahead of time call the kernels, past the dispatcher. A step
    names the file, which must be loaded before it.
    """
    file = load()
    if file is None:
        return {}
    declared = {
        getattr(torch.ops.kvalign, name).default: [f"AOTITorchError aoti_torch_cpu_{name}({types})"]
        for name, types in _SHIMS.items()
    }
    linked = f":{file.name} -L{shlex.quote(str(file.parent))}"
    return {
        "aot_inductor.custom_ops_to_c_shims": declared,
        "aot_inductor.custom_op_libs": [linked],
    }


def attends(head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend` takes queries of such heads here, on this device, of this dtype."""
    return (
        dtype in (torch.float32, torch.float16, torch.bfloat16)
        and head_dim in DIMS
        and device.type == "cpu"
        and not torch.is_grad_enabled()
        and is_here()
    )


def attend(
    places: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    angles: Tensor | None = None,
    bases: Tensor | None = None,
    tables: Sequence[Tensor] | None = None,
    asking: Tensor | None = None,
    num_sinks: int = 0,
    beside: Sequence[Tensor] | None = None,
    new: Sequence[Tensor] | None = None,
    network: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Attention of one query of each row, once a new entry of each is written.

    Args:
        places: [B or 1, S] int64, the place of each slot's entry among those that its row sees;
            negative if it sees none there.
        query: [B, H, 1, D] in floats; D is one of `DIMS`.
        keys, values: slots, [B, H_kv, S, D] float32, float16 or bfloat16, or [B, H_kv, S, D + 4]
            int8 (`kvalign.cache.int8`). The slots of a head lie side by side.
        angles: [1, 2, P, N] float32: cosines and sines that rotate N pairs of the numbers of a key,
            `halves` of `kvalign.models.rope`, to its place; there are P. None: keys do not rotate.
        bases: [H_kv, D] float32, what is added to keys of int8 before; None: 0.
        tables: means [H_kv, P, D] of keys and of values, and their scales [H_kv, P], float32: an
            entry at place p is mean[p] + scale[p] * (what is stored). Empty: as it is stored.
        asking: [B, H, 1, D], the query as it meets the means of keys; None: as it is.
        num_sinks: entries at the first places, which are stored as they are.
        beside: what this function returned of the same queries and other entries, [B, H, D] and
            [B, H] float32: the output is as if those were slots, too. None: there are none.
        new: slot [1] int64, keys and values [B, H_kv, 1, D] float32, of which a row's numbers lie
            side by side, and their places [B] int64. They are written there first, without what a
            place adds: mean and scale, or rotation and base. Slots are then float32, or int8 as
            `Int8.encode` makes them, to the last digit. None: nothing is written.
        network: weights [M, 2 H_kv D] and biases [M] of a hidden layer, and [H_kv D, M] and [H_kv
            D] of what it adds to new keys, and to values, once they have no mean and scale; M is a
            multiple of 16. Empty: nothing is added.

    Returns:
        [B, 1, H, D] float32, 0 where no entry is seen, and of these slots alone the logarithm of
        the sum of the exponentials, [B, H] float32.
    """
    none = query.new_empty(_NONE.shape) if torch.compiler.is_compiling() else _NONE
    query = query.float().contiguous()
    of_query = (
        query,
        keys,
        values,
        none if angles is None else angles,
        none if bases is None else bases,
        query if asking is None else asking.float().contiguous(),
        *((none,) * 4 if tables is None else tables),
        *((none,) * 2 if beside is None else beside),
    )
    if new is None:
        output, log_sum = torch.ops.kvalign.attend.default(places, *of_query, scale, num_sinks)
    else:
        of_new = *new, *(network or (none,) * 6), scale, num_sinks
        output, log_sum = torch.ops.kvalign.write_and_attend.default(places, *of_query, *of_new)
    return output, log_sum


_unfit = set[torch.device]()
"""Devices on which our Triton kernel has failed."""


def takes_triton(query: Tensor) -> bool:
    """Return whether our Triton kernel attends for queries [B, H, 1, D]: on CUDA, without a slope,
    where Triton is. `KVALIGN_TRITON=0` turns it off.
    """
    is_free = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    return query.is_cuda and is_free and query.device not in _unfit and _triton_kernel() is not None


@functools.cache
def _triton_kernel() -> ModuleType | None:
    if os.environ.get("KVALIGN_TRITON") == "0":
        return None
    try:
        from kvalign.models import triton_kernel
    except ImportError:
        return None
    return triton_kernel


def attend_by_triton(places: Tensor, query: Tensor, *args: Any, **by: Any) -> Tensor | None:
    """Output [B, 1, H, D] of our Triton kernel (`kvalign.models.triton_kernel.attend`); None, and a
    line once, where it fails.
    """
    triton_kernel = _triton_kernel()
    assert triton_kernel is not None
    try:
        output, _ = triton_kernel.attend(places, query, *args, **by)
    except Exception as error:  # of any compiler, on any card
        _unfit.add(query.device)
        first = str(error).strip().partition("\n")[0]
        warn_once(f"tables and memories are read by PyTorch's kernels: our own failed: {first}")
        return None
    return output


def can_rotate(rotation: Rotation | None) -> bool:
    """Return whether our attention can rotate keys by this rotation of all layers."""
    if rotation is None:
        return True
    return not isinstance(rotation, RotationByLayer) and rotation.layout == "halves"


class Placing(NamedTuple):
    """Facts by which queries see what they find in a memory; there are A ages.

    Attributes:
        tables: as of `attend`; None: entries are as they are stored.
        first: row of the tables for the first of the entries that are found.
        now: [B or 1, T] int64, the positions of the queries, where a row is as far before these as
            an entry lies; None: entries have rows one after another.
        angles: [1, 2, P, N] float32, as of `attend`, of places beyond the window; None: keys do not
            rotate.
        far: [A] float32, by age, how far beyond the window an entry lies that has no neighbours;
            None: entries lie side by side.
        most_apart, room: as of `kvalign.memory.recall_places`.
        age_bias: [A] float32, added to scores by age; None: 0.
        bias: added to all scores.
    """

    tables: Sequence[Tensor] | None = None
    first: int = 0
    now: Tensor | None = None
    angles: Tensor | None = None
    far: Tensor | None = None
    most_apart: int = 0
    room: int = 0
    age_bias: Tensor | None = None
    bias: float = 0.0


def alike_first(keys: Tensor) -> Tensor:
    """Return the order [N, T] int64 of keys [N, T, D] float32 in which blocks of 16 are alike; T is
    16 times a power of 2. Sets are halved along their longest axis, until they are blocks.
    """
    return torch.ops.kvalign.alike_first.default(keys.contiguous())


def write_sketch(
    keys: Tensor,
    turn: Tensor,
    numbers: Tensor,
    scales: Tensor,
    fine: Tensor | None,
    first: int,
    slots: Tensor | None = None,
) -> None:
    """Write keys less their base into a sketch (`kvalign.memory.sketch`).

    Args:
        keys: [..., T, D] float32, D one of `DIMS`.
        turn: [D, D] float32.
        numbers, scales, fine: of all S entries, [..., S / 16, D / 16, 16, 4], [..., S] and [..., S,
            D / 2 + 4], each in one stretch; without `fine` only in 2 bits.
        first: the entry of the first key.
        slots: [..., T] int64, of each key; None: as entries lie.

    Raises:
        RuntimeError: entries or numbers that the sketch does not have.
    """
    torch.ops.kvalign.write_sketch.default(
        keys.flatten(0, -3).contiguous(),
        turn,
        _NONE if slots is None else slots.contiguous(),
        numbers,
        scales.view(-1, scales.shape[-1]),
        _NONE if fine is None else fine,
        first,
    )


def find(
    tensors: Sequence[Tensor],
    near: int,
    num_blocks: int,
    num_estimated: int,
    num_scored: int,
    num_compared: int,
    num_recalled: int,
    alike: float,
    *,
    key_bases: Tensor | None = None,
    angles: Angles | None = None,
    placing: Placing | None = None,
    are_on_disk: bool = False,
) -> list[Tensor]:
    """Search of queries in a memory (`kvalign.memory.memory`), or attention over what they find.
    Each tensor lies in one stretch.

    Args:
        tensors: queries [B, H, G, T, D], scaled, with D one of `DIMS`; keys and values [B, H, S, D]
            float32, float16, bfloat16, or int8, [B, H, S, D + 4] (`kvalign.cache.int8`); bases [B,
            H, 1, D] float32; what a sketch of them has (`kvalign.memory.sketch`); worths [A]
            float32, added to scores, of ages from A - 1 down to 0. And int64, of one row where all
            are alike: newest [B, 1, 1, 1], the slot of the newest entry in a ring without an end;
            since [B, 1, T, 1], tokens after it; oldest [B, 1, T, 1], the age of the oldest entry
            that is lost.
        near: age of the oldest that is not lost.
        num_blocks: blocks that are read of the pages in order (up to an eighth more).
        num_estimated, num_scored, num_compared, num_recalled: entries whose score is estimated by 4
            bits (up to an eighth more), whose score is exact, that are compared, and that are taken
            back.
        alike: cosine from which two keys say the same.
        key_bases: [H, D] float32, what all keys are stored without; None: 0.
        angles: by which queries are rotated first, of pairs that are `halves`, [B or 1, 1, 1, T, N]
            or fewer dimensions; None: they are not.
        placing: how queries see what they find; None: what they find is asked for.
        are_on_disk: whether keys and values are, in a file that is mapped: many are then waited for
            at once.

    Returns:
        Without `placing` keys and values [B, H, T, num_recalled, D] in the order of time, what is
        missing first; their ages [B, H, T, num_recalled] int64, and bool whether each is there.
        With it the output of attention [B, H, G, T, D] float32, 0 where nothing is found, and the
        logarithm of the sum of the exponentials [B, H, G, T] float32.
    """
    nums = near, num_blocks, num_estimated, num_scored, num_compared, num_recalled
    none = tensors[0].new_empty(_NONE.shape) if torch.compiler.is_compiling() else _NONE
    placed, first = placing or Placing(), -1 if placing is None else placing.first
    of_queries = key_bases, *((None,) * 2 if angles is None else angles[:2])
    tables = (None,) * 4 if placed.tables is None else placed.tables
    of_placing = *tables, placed.angles, placed.far, placed.age_bias, placed.now
    found = torch.ops.kvalign.find.default(
        *tensors,
        *(none if x is None else x for x in (*of_queries, *of_placing)),
        *(*nums, first, placed.most_apart, placed.room, int(are_on_disk), alike, placed.bias),
    )
    return found[:4] if placing is None else found[4:]
