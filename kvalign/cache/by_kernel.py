"""Attention by our kernel, which reads all slots of a ring as they are stored; a guest of the
cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvalign.cache.form import Form
from kvalign.cache.int8 import Int8
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.foundation.autograd import no_autograd_modes
from kvalign.models import kernel
from kvalign.models.architectures import REGISTERED, rotation_of, window_of
from kvalign.models.attention import install
from kvalign.models.rope import Rotation


class InSight(NamedTuple):
    """The entries that one query of each row sees.

    Attributes:
        places: [B, S] int64, the place of each slot's entry among those of its row; negative: it is
            not there.
        behind: [B, 1, 1] int64, the position of place 0.
        angles: of as many places, as our kernel takes them; None: keys do not rotate.
    """

    places: Tensor
    behind: Tensor
    angles: Tensor | None

    def attend(
        self, form: Form, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of queries [B, H, 1, D]: [B, 1, H, D]."""
        rotation = form.rotation if isinstance(form, Int8) else None
        if self.angles is not None and rotation is not None:  # which count from the first
            query = rotation.shift(query, self.behind)
        base = None if form.base is None else form.base[:, 0]
        return kernel.attend(self.places, query, keys, values, scale, self.angles, base)


def places_of(step: Step, num_slots: int) -> Tensor:
    """Places of the entries of so many slots: [B, S] int64, negative where a row has none."""
    places = step.places.expand(len(step.seen), -1)
    return pad(places, (0, num_slots - step.size), value=-1).contiguous()


def is_read_by_kernel(model: PreTrainedModel, keys: Tensor) -> bool:
    """Return whether our kernel attends to such stored keys [B, H, S, D] instead of the model."""
    is_int8 = keys.dtype == torch.int8
    form = Int8(model.dtype) if is_int8 else Form(model.dtype)
    return (
        model.config.model_type in REGISTERED
        and window_of(model.config) is None
        and keys.shape[3] in map(form.width, kernel.DIMS)
        and model.dtype == torch.float32
        and kernel.is_here()
        and (not is_int8 or kernel.can_rotate(rotation_of(model)))
    )


def reader_of(
    model: PreTrainedModel, sizes: CacheSizes, head_dim: int, rotation: Rotation | None
) -> Callable[[Step, int], InSight] | None:
    """Reader of a cache's entries of 8 bits, whose keys rotate so, in decode steps: of a step and
    the number of slots. None: the model's attention reads them.
    """
    width = Int8(model.dtype).width(head_dim)
    stored = torch.empty(1, 1, 1, width, dtype=torch.int8)
    if model.device.type != "cpu" or not is_read_by_kernel(model, stored):
        return None
    install(model.config)
    angles = None
    if rotation is not None:
        with no_autograd_modes():
            places = slice(0, sizes.first_input_len)
            of_places = rotation.angles_to(places, torch.device("cpu"))
            angles = torch.stack([of_places.cos, of_places.sin])[None]
    return lambda step, num: InSight(places_of(step, num), step.behind_rows, angles)
