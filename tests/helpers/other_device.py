"""A device that only tests have: its tensors lie in the CPU's memory, but an operation that mixes
them with those of the CPU fails, as on a GPU. So what runs here passes everything between the two
devices as it would have to there.

Tensors of no dimension may be of the CPU, and so may indices; a copy may go from one to the other.
From the import on, PyTorch's spare backend (`privateuseone`) is this device in the whole process.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
aten: Any = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
INSTEAD: dict[Any, Callable] = {}
"""Functions of the CPU's tensors, for operations that it does not have."""
_is_recording = False


class OtherTensor(Tensor):
    """A tensor of the other device; `held` is the CPU's."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset())
        about = dict(dtype=held.dtype, device=NAME, requires_grad=False)
        return Tensor._make_wrapper_subclass(cls, held.shape, **layout, **about)

    def __init__(self, held: Tensor):
        self.held = held

    def __repr__(self):
        return f"OtherTensor({self.held})"

    def tolist(self):
        _refuse_in_recording("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, *args, **kwargs or {})


@contextmanager
def recording():
    """Context in which what a CUDA graph cannot record is refused: numbers of this device that are
    read, and tensors that are copied from the CPU or to it.
    """
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False


def moved(model: nn.Module) -> nn.Module:
    """Return the model, moved to the other device."""
    for module in model.modules():
        for name, x in module._parameters.items():
            if x is not None:
                module._parameters[name] = nn.Parameter(OtherTensor(x.data), requires_grad=False)
        for name, x in module._buffers.items():
            if x is not None:
                module._buffers[name] = OtherTensor(x)
    return model


def _run(func, *args, **kwargs):
    """Run an operation on what the tensors hold."""
    found = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    others = [x for x in found if isinstance(x, OtherTensor)]
    here = [x for x in found if not isinstance(x, OtherTensor) and x.dim()]
    may_mix = func is aten.copy_.default or (func in _INDEXING and args[0] is others[0])
    if others and here and not may_mix:
        raise RuntimeError(f"{func}: tensors on two devices")
    device = kwargs.get("device")
    is_other = bool(others) if device is None else torch.device(device).type == NAME
    by_mask = func is aten.index.Tensor and any(x.dtype == torch.bool for x in found[1:])
    is_copied = len(others) < len(found) if func is aten.copy_.default else bool(here)
    if others and (is_copied or by_mask or not is_other or func in _READS):
        _refuse_in_recording(func)
    if device is not None:
        kwargs["device"] = "cpu"
    plain, named = tree_map(_held, (args, kwargs))
    result = INSTEAD.get(func, func)(*plain, **named)
    for given, x in zip(args, plain, strict=True):
        if x is result and isinstance(x, Tensor):  # changed in place
            return given
    return tree_map(_wrapped, result) if is_other else result


def _refuse_in_recording(what):
    if _is_recording:
        raise RuntimeError(f"{what}: cannot be recorded")


def _wrapped(x):
    return OtherTensor(x) if isinstance(x, Tensor) else x


def _held(x):
    return x.held if isinstance(x, OtherTensor) else x


def _copy_from(x, to, non_blocking=False):
    if isinstance(x, OtherTensor) != isinstance(to, OtherTensor):
        _refuse_in_recording("copy")
    _held(to).copy_(_held(x))
    return to


_setup_privateuseone_for_python_backend(NAME)
_libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_libraries[0].fallback(_run, "PrivateUse1")
_libraries[1].impl("_copy_from", _copy_from, "PrivateUse1")
for _name in ("arange", "arange.start", "arange.start_step"):  # else made empty, then resized
    _op, _, _overload = _name.partition(".")
    _made = partial(_run, getattr(getattr(aten, _op), _overload or "default"))
    _libraries[1].impl(_name, _made, "PrivateUse1")
