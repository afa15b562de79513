"""An auxiliary loss that gives a small model heads that copy.

After `A B ... A` such a model should guess `B`. Two layers do that (Olsson et al. 2022, "In-context
learning and induction heads"): a head of the earlier one writes into each entry which token came
before it, a head of the later one looks for the entry before which the newest token came. The loss
of a language model alone forms them late, as neither helps without the other. So both are shown
where to look until they are there.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

NUM_HEADS = 2  # of either kind
_LEAST = 1e-5  # of an attention weight: the logarithm of 0 is none


def copy_loss(attentions: tuple[Tensor, ...], ids: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats of looking at the right entries, from attention weights [B, H, T, T] of each
    layer: the first heads of one layer at the token before, those of a later layer at each entry
    that a copy of the newest token came before, and that is the label.
    """
    before, after = layers_of(len(attentions))
    back = attentions[before][:, :NUM_HEADS].float().diagonal(-1, -2, -1)  # [B, H, T - 1]
    loss = -(back + _LEAST).log().mean()
    right = right_places(ids, labels)[:, None]  # [B, 1, T, T]
    weights = (attentions[after][:, :NUM_HEADS].float() * right).sum(-1)  # [B, H, T]
    counted = right.any(-1).expand_as(weights)
    return loss - ((weights + _LEAST).log() * counted).sum() / counted.sum().clamp(min=1)


def layers_of(num_layers: int) -> tuple[int, int]:
    """Layers whose first heads look at the token before, and at what came after a copy."""
    before = num_layers // 3
    return before, max(before + 1, 2 * num_layers // 3)


def right_places(ids: Tensor, labels: Tensor) -> Tensor:
    """Return which entries copy the label of each token of ids [B, T]: [B, T, T] bool, tokens by
    entries.
    """
    before = pad(ids[:, :-1], (1, 0), value=-1)
    follows = before[:, None, :] == ids[:, :, None]
    is_label = ids[:, None, :] == labels[:, :, None]
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    return follows & is_label & seen


def show_attention(model: PreTrainedModel, on: bool) -> None:
    """Let a model return its attention weights, or compute attention in the fast way again."""
    model.set_attn_implementation("eager" if on else "sdpa")
