"""Weights of 4 or 8 bits in memory. On a CPU a decode step mostly reads weights, so fewer bytes
take less time.

int4: in groups of 32 inputs, w = s (q - 8) + z with q of 4 bits, s and z of 16 bits. This is the
form of llama.cpp's Q4_0, Q4_1 and Q4_K, so weights stored in these forms keep the same q. Others
are rounded to the nearest of 16 even levels between the least and the greatest of the group. The
head and the embedding have 8 bits, as in those files. int8: w = s (q - 128) in the same groups, as
llama.cpp's Q8_0.

If the CPU and a compiler allow it, our own kernel computes products and rounds inputs to 8 bits.
Else, and on CUDA, it is PyTorch's kernel, with inputs in bfloat16, and the embedding is not packed.
Everything between the products stays unchanged on a CPU, and is in bfloat16 on CUDA.
"""

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.progress import warn_once
from kvalign.models import kernel

log = logging.getLogger(__name__)

GROUP = 32  # inputs that share a scale
_BLOCK, _TORCH_BLOCK = 16, 64  # outputs that lie together, for our kernel and PyTorch's
_LEAST = 2**-24  # of a scale: the least number of float16
_MOST = 0.9  # share of the bytes from which it is said to those alone who ask
_CLOSE = 1e-3  # steps that a weight may lie beside a level and count as lying there


class PackedLinear(nn.Module):
    """Replacement of an `nn.Linear`: inputs [..., K] to outputs [..., N], in the inputs' dtype.

    Args:
        weight: [N, K], K a multiple of `GROUP`.
        bits: 4 or 8.
        buffers: of weights that were packed before, of which only the shape is read.
    """

    of_scales: ClassVar[torch.dtype]
    names: ClassVar[tuple[str, ...]] = ("packed",)  # of its buffers
    packed: Tensor

    def __init__(
        self,
        weight: Tensor,
        bits: int,
        bias: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits, self.bias = bits, bias
        buffers = buffers or self.buffers_of(*parts(weight, bits, self.of_scales))
        for name, x in buffers.items():
            self.register_buffer(name, x)

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x.reshape(-1, self.in_features)).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias.to(x.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def buffers_of(self, q: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Buffers by name, from q [N, K] and scales [N, K / 32, 1 or 2] of weights."""

    @abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """Product of rows [M, K] and the weights: [M, N]."""

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """All weights, unpacked, [K, N]."""


@final
class RoundingLinear(PackedLinear):
    """Product with our own kernel, which rounds inputs to 8 bits (`kvalign.models.kernel`)."""

    of_scales = torch.float16  # as in GGUF files
    packed: Tensor  # as of `packed_of`

    def buffers_of(self, q: Tensor, scales: Tensor) -> dict[str, Tensor]:
        return {"packed": packed_of(q, scales)}

    def product(self, rows: Tensor) -> Tensor:
        if rows.requires_grad:
            return rows @ self.unpacked(rows.dtype)
        rows = rows.float().contiguous()
        return torch.ops.kvalign.packed_product(rows, self.packed, self.out_features)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of outputs [T], unpacked, [T, K]."""
        q, scales = (x.to(dtype) for x in codes_of(self.packed, outputs))
        groups = (q - 2 ** (self.bits - 1)).unflatten(1, (-1, GROUP)) * scales[..., :1]
        return (groups + scales[..., 1:] if self.bits == 4 else groups).flatten(1)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return self.rows(torch.arange(self.out_features), dtype).T


def packed_of(q: Tensor, scales: Tensor) -> Tensor:
    """Weights as our kernel reads them. The bytes of a group are its q, by fours of inputs, then s
    and z; those of 8 bits have no z. Of 4 bits, eight inputs are 64 bytes: the first four of each
    output in the low halves.

    Args:
        q: [N, K] uint8, of 0 to 15 or, where z is missing, of 0 to 255.
        scales: [N, K / GROUP, 2 or 1] float16: s, and z.

    Returns:
        [blocks of outputs, K / GROUP, bytes] uint8, filled up with zeros.
    """
    num_pad = -len(q) % _BLOCK
    q, scales = pad(q, (0, 0, 0, num_pad)), pad(scales, (0, 0, 0, 0, 0, num_pad))
    fours = q.view(-1, _BLOCK, q.shape[1] // GROUP, 8, 4).permute(0, 2, 3, 1, 4)
    if scales.shape[2] == 2:
        fours = fours[:, :, ::2] | fours[:, :, 1::2] << 4
    after = scales.unflatten(0, (-1, _BLOCK)).permute(0, 2, 3, 1).contiguous()
    return torch.cat([fours.flatten(2), after.view(torch.uint8).flatten(2)], 2)


def codes_of(packed: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The q [T, K] and scales [T, K / GROUP, 2 or 1] of outputs [T], as `packed_of` got them."""
    num_scales = 2 if packed.shape[2] == 320 else 1
    num_fours = (packed.shape[2] - 32 * num_scales) // 64
    block, index = outputs[:, None] // _BLOCK, outputs[:, None] % _BLOCK
    # Where the bytes of an output lie in each group; a copy of all scales would take too long.
    fours = 64 * torch.arange(num_fours)[:, None] + torch.arange(4)
    after = 64 * num_fours + 32 * torch.arange(num_scales)[:, None] + torch.arange(2)
    at = torch.cat([fours.flatten() + 4 * index, after.flatten() + 2 * index], 1)
    codes = packed[block, :, at].transpose(1, 2)  # [T, K / GROUP, bytes]
    q, scales = codes.split([4 * num_fours, 2 * num_scales], 2)
    if num_scales == 2:
        q = q.unflatten(2, (-1, 4))
        q = torch.stack([q & 15, q >> 4], 3).flatten(2)
    return q.flatten(1), scales.clone(memory_format=torch.contiguous_format).view(torch.float16)


@final
class TorchLinear(PackedLinear):
    """Product with PyTorch's kernel for 4 bits, in its layout, which differs between CPUs; on CUDA
    for a GPU of 2020 or later. Weights of 8 bits are two of 4 bits with the same input, w = 16 s
    high + s low: for both the kernel takes less time than PyTorch's own for 8 bits.
    """

    of_scales = torch.bfloat16
    names = ("packed", "scales")
    # K doubled where bits is 8; N' is N filled up to blocks. On a CPU [N', K / 2] uint8, on CUDA
    # [N' / 8, K / (16 t), 32, t / 2] int32, t of 2, 4 or 8.
    packed: Tensor
    scales: Tensor  # [K / GROUP, N', 2] bfloat16: s and z

    def buffers_of(self, q: Tensor, scales: Tensor) -> dict[str, Tensor]:
        if self.bits == 8:
            q, s = torch.cat([q >> 4, q & 15], 1), scales[..., 0]
            high, low = torch.stack([16 * s, 0 * s], -1), torch.stack([s, 8 * s], -1)
            scales = torch.cat([high, low], 1)
        packed = self.laid_out(_pad_blocks(q))
        return {"packed": packed, "scales": _pad_blocks(scales).transpose(0, 1).contiguous()}

    def product(self, rows: Tensor) -> Tensor:
        if rows.requires_grad:
            return rows @ self.unpacked(rows.dtype)
        rows = rows.bfloat16()
        if self.bits == 8:
            rows = torch.cat([rows, rows], 1)
        is_cpu = self.packed.device.type == "cpu"
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm_for_cpu if is_cpu else aten._weight_int4pack_mm
        return multiply(rows, self.packed, GROUP, self.scales)[:, : self.out_features]

    def laid_out(self, q: Tensor) -> Tensor:
        """Levels [N', K] uint8 in the kernel's layout."""
        if q.device.type == "cpu":
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        tiles = next(t for t in (8, 4, 2) if q.shape[1] % (16 * t) == 0)
        pairs = (q[:, ::2] << 4 | q[:, 1::2]).contiguous()
        return torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        one = torch.eye(self.in_features, dtype=torch.bfloat16, device=self.packed.device)
        return self.product(one).to(dtype)


def parts(weight: Tensor, bits: int, of_scales: torch.dtype) -> tuple[Tensor, Tensor]:
    """Packed parts of weights [N, K]: q [N, K] uint8; s and z, for 8 bits only s, [N, K / GROUP, 2
    or 1] `of_scales`.
    """
    if bits == 4:
        q, step, low = levels_of(weight)
        return q, torch.stack([step, low + 8 * step], -1).to(of_scales)
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp_min(_LEAST).to(of_scales)
    q = (groups / scales.float()).round_().clamp_(-127, 127) + 128
    return q.flatten(1).to(torch.uint8), scales


def _pad_blocks(x: Tensor) -> Tensor:
    num_pad = -len(x) % _TORCH_BLOCK
    return torch.cat([x, x.new_zeros(num_pad, *x.shape[1:])]) if num_pad else x


def levels_of(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Even levels of each group, and the level nearest to each weight: w = low + q step.

    If all weights of a group lie on at most 16 even levels, as after storage in 4 bits, these are
    its levels.

    Args:
        weight: [N, K], K a multiple of `GROUP`.

    Returns:
        q [N, K] of 0 to 15 uint8; step and low [N, K / GROUP] float32.
    """
    groups = weight.detach().float().reshape(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    offset = groups - low
    step = (high - low) / 15
    if has_levels(weight):
        step = _even_steps(offset, high - low)
    q = (offset / step.clamp_min(1e-30)).round_().clamp_(0, 15).to(torch.uint8)
    return q.view(weight.shape), step.view(len(weight), -1), low.view(len(weight), -1)


def _even_steps(offset: Tensor, span: Tensor) -> Tensor:
    """The greatest number of steps, at most 15, on whose levels all of a group lie, as its step;
    where there is none, 15.

    Args:
        offset: [G, GROUP] weights less the least of their group.
        span: [G, 1] the greatest of them.
    """
    step = span / 15
    groups = torch.arange(len(span), device=span.device)
    for num in range(15, 0, -1):
        tried = span[groups] / num
        steps = offset[groups] / tried.clamp_min(1e-30)
        fits = ((steps - steps.round()).abs() < _CLOSE).all(1)
        step[groups[fits]] = tried[fits]
        groups = groups[~fits]
        if not len(groups):
            break
    return step


def has_levels(weight: Tensor) -> bool:
    """Return whether the first groups of weights [N, K] lie on at most 16 even levels each."""
    groups = weight.detach().flatten()[: 64 * GROUP].float().view(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    steps = (groups - low) / _even_steps(groups - low, high - low).clamp_min(1e-30)
    return bool(((steps - steps.round()).abs() < _CLOSE).all())


PACKED = ("int8", "int4")


@final
class PackedEmbedding(nn.Module):
    """Replacement of an `nn.Embedding`, with the weights of a product, such as the head."""

    def __init__(self, product: RoundingLinear, dtype: torch.dtype):
        super().__init__()
        self.product = product
        # Of no size: it follows the model to another dtype.
        self.like = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Tensor [0] that Llama 4 asks for its device."""
        return self.like

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors [..., K] of ids [...]."""
        return self.product.rows(ids.flatten(), self.like.dtype).view(*ids.shape, -1)


def kind_for(device: torch.device) -> type[PackedLinear]:
    """Return which kernel multiplies packed weights there."""
    return RoundingLinear if device.type == "cpu" and kernel.is_here() else TorchLinear


def pack(
    model: PreTrainedModel,
    weights: str,
    device: torch.device | None = None,
    stored: Mapping[str, Tensor] | None = None,
) -> None:
    """Replace a model's weights by packed ones, in all products whose inputs come in groups of 32
    and, with our kernel, in the embedding of tokens. If it and the head share weights, they still
    do.

    Args:
        model: on a CPU with weights in float32, on CUDA in bfloat16.
        weights: int8, or int4.
        device: of the packed weights; None: the model's.
        stored: tensors of a model that was packed before, by name; the model needs no numbers.

    Raises:
        KeyError: a name that `stored` lacks.
        UserError: a form that is not known, or a model that cannot be packed.
    """
    device = device or model.device
    kind = kind_for(device)

    def made(path: str, weight: Tensor, bits: int, bias: Tensor | None = None) -> PackedLinear:
        if stored is None:
            progress.phase(f"packing {path}")
        buffers = stored and {name: stored[f"{path}.{name}"] for name in kind.names}
        return kind(weight, bits, bias, buffers).train(model.training)

    num_before = sum(x.nbytes for x in model.parameters())
    sizes = {id(x): (name, x.nbytes, x.ndim) for name, x in model.named_parameters()}
    head = model.get_output_embeddings()
    modules = [(name, module) for name, module in model.named_modules() if _fits(module)]
    if not modules:
        raise UserError(f"weights of {weights} need products of inputs in groups of {GROUP}")
    embedding = model.get_input_embeddings()
    rows = embedding.weight
    for name, module in modules:
        sizes.pop(id(module.weight), None)
        bits = 8 if weights == "int8" or module is head else 4
        model.set_submodule(name, made(name, _weight_of(module), bits, module.bias))
    # Others do more than look up, such as Gemma's, which scales.
    is_plain = type(embedding) is nn.Embedding and embedding.embedding_dim % GROUP == 0
    if kind is RoundingLinear and is_plain:
        path = next(name for name, module in model.named_modules() if module is embedding)
        shares = head is not None and head.weight is rows
        product = model.get_output_embeddings()
        if not shares:
            product = made(f"{path}.product", rows.detach(), 8)
        model.set_input_embeddings(PackedEmbedding(product, rows.dtype).train(model.training))
        sizes.pop(id(rows), None)
    _say_what_is_left(weights, *sizes.values(), num_bytes=num_before)
    model.save_pretrained = model.push_to_hub = _not_saved


def _say_what_is_left(weights: str, *left: tuple[str, int, int], num_bytes: int) -> None:
    """Say what share was packed of so many bytes, and which matrices were not."""
    share = 1 - sum(size for _, size, _ in left) / num_bytes
    names = {re.sub(r"\.\d+\.", ".*.", name): None for name, _, ndim in left if ndim > 1}
    line = f"{weights}: {share:.0%} of the bytes of the weights are packed"
    if names:
        line += f", not {', '.join([*names][:3])}{' ...' if len(names) > 3 else ''}"
    (warn_once if share < _MOST else log.info)(line)


def _not_saved(*args: Any, **kwargs: Any) -> NoReturn:
    """Refusal of what would write a folder that nothing reads."""
    raise UserError(
        "packed weights cannot be saved as a model: load it with weights=float32 and save that"
    )


def weights_of(model: PreTrainedModel) -> str:
    """Return the form of a model's weights: int4, int8, or their dtype as torch names it."""
    bits = {module.bits for module in model.modules() if isinstance(module, PackedLinear)}
    return f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")


def is_of_4_bits(model: PreTrainedModel) -> bool:
    """Return whether all products but the head were stored in 4 bits, by some of their groups."""
    head = model.get_output_embeddings()
    products = [x for x in model.modules() if _fits(x) and x is not head]
    return bool(products) and all(has_levels(_weight_of(x)) for x in products)


def _fits(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D) and _weight_of(module).shape[1] % GROUP == 0


def _weight_of(module: nn.Module) -> Tensor:
    """The weights [N, K] of a product; GPT-2's are stored the other way round."""
    weight: Any = module.weight
    return (weight.T if isinstance(module, Conv1D) else weight).detach()
