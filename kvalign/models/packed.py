"""Weights of 4 or 8 bits in memory. On a CPU a decode step mostly reads weights, so fewer bytes
take less time.

int4: in groups of 32 inputs, w = s (q - 8) + z with q of 4 bits, s and z of 16 bits. This is the
form of llama.cpp's Q4_0, Q4_1 and Q4_K, so weights stored in these forms keep the same q. Others
are rounded to the nearest of 16 even levels between the least and the greatest of the group. The
head and the embedding have 8 bits, as in those files. int8: w = s (q - 128) in the same groups, as
llama.cpp's Q8_0.

If the CPU and a compiler allow it, our own kernel computes products and rounds inputs to 8 bits.
Else it is PyTorch's kernel, with inputs in bfloat16. Everything between the products stays
unchanged. On CUDA it is PyTorch's kernel, too; the embedding is not packed there, and all else is
in bfloat16.
"""

from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.models import kernel
from kvalign.models.packed_linear import (
    GROUP,
    CudaLinear,
    PackedLinear,
    RoundingLinear,
    TorchLinear,
    has_levels,
)

PACKED = ("int8", "int4")


@final
class PackedEmbedding(nn.Module):
    """Replacement of an `nn.Embedding`, with the weights of a product, such as the head."""

    def __init__(self, product: PackedLinear, dtype: torch.dtype):
        super().__init__()
        self.product = product
        # Of no size: it follows the model to another dtype.
        self.like = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors [..., K] of ids [...]."""
        return self.product.rows(ids.flatten(), self.like.dtype).view(*ids.shape, -1)


def pack(model: PreTrainedModel, weights: str) -> None:
    """Replace a model's weights by packed ones, in all products whose inputs come in groups of 32
    and, on a CPU, in the embedding of tokens. If it and the head share weights, they still do.

    Args:
        model: on a CPU with weights in float32, on CUDA in bfloat16.
        weights: int8, or int4.
    """
    head = model.get_output_embeddings()
    modules = [(name, module) for name, module in model.named_modules() if _fits(module)]
    if not modules:
        raise UserError(f"weights of {weights} need products of inputs in groups of {GROUP}")
    kind: type[PackedLinear] = CudaLinear
    if on_cpu := model.device.type == "cpu":
        kind = RoundingLinear if kernel.is_here() else TorchLinear
    embedding = model.get_input_embeddings()
    rows = embedding.weight
    for name, module in modules:
        progress.phase(f"packing {name}")
        bits = 8 if weights == "int8" or module is head else 4
        packed = kind(_weight_of(module), bits, module.bias).train(module.training)
        model.set_submodule(name, packed)
    # Others do more than look up, such as Gemma's, which scales.
    if on_cpu and type(embedding) is nn.Embedding and embedding.embedding_dim % GROUP == 0:
        shares = head is not None and head.weight is rows
        product = model.get_output_embeddings() if shares else kind(rows.detach(), 8)
        model.set_input_embeddings(PackedEmbedding(product, rows.dtype).train(model.training))
    model.save_pretrained = model.push_to_hub = _not_saved


def _not_saved(*args: Any, **kwargs: Any) -> NoReturn:
    """Refusal of what would write a folder that nothing reads."""
    raise UserError(
        "packed weights cannot be saved as a model: load it with weights=float32 and save that"
    )


def embedded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The embedding's weights of ids [T], before any scaling, [T, K]."""
    embedding = model.get_input_embeddings()
    return embedding(ids) if isinstance(embedding, PackedEmbedding) else embedding.weight[ids]


def num_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights in memory; those of several modules count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


def weights_of(model: PreTrainedModel) -> str:
    """Return the form of a model's weights: int4, int8, or their dtype as torch names it."""
    bits = {module.bits for module in model.modules() if isinstance(module, PackedLinear)}
    return f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")


def is_of_4_bits(model: PreTrainedModel) -> bool:
    """Return whether the weights of all products except the head were stored in 4 bits, judged from
    some of their groups.
    """
    head = model.get_output_embeddings()
    products = [x for x in model.modules() if _fits(x) and x is not head]
    return bool(products) and all(has_levels(_weight_of(x)) for x in products)


def _fits(module: nn.Module) -> bool:
    """Return whether it is a product whose inputs come in groups."""
    return type(module) in (nn.Linear, Conv1D) and _weight_of(module).shape[1] % GROUP == 0


def _weight_of(module: nn.Module) -> Tensor:
    """The weights [N, K] of a product; GPT-2's are stored the other way round."""
    weight: Any = module.weight
    return (weight.T if isinstance(module, Conv1D) else weight).detach()
