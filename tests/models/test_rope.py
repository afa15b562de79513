"""Rotating keys back is exact: by model, in sums, by slot and in every dtype."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvalign.models.rope import rerotate

FREQ = 1e4 ** (-torch.arange(4) / 4)


def _keys(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_rotation_is_that_of_transformers():
    keys = _keys()
    angles = torch.arange(9, 9 - 6, -1)[:, None] * FREQ
    cos, sin = (f(torch.cat([angles, angles], -1))[None] for f in (torch.cos, torch.sin))
    _, expected = apply_rotary_pos_emb(keys, keys, cos, sin)
    assert torch.allclose(rerotate(keys, -torch.arange(9, 9 - 6, -1), FREQ), expected, atol=1e-6)


def test_shifts_add_up_and_go_back():
    keys = _keys()
    assert torch.allclose(
        rerotate(rerotate(keys, 5, FREQ), 7, FREQ), rerotate(keys, 12, FREQ), atol=1e-6
    )
    assert torch.allclose(rerotate(rerotate(keys, 5, FREQ), -5, FREQ), keys, atol=1e-6)
    assert torch.equal(rerotate(keys, 0, FREQ), keys)


def test_each_slot_has_its_own_shift():
    keys, shifts = _keys(), torch.tensor([0, 1, 1, 5, 200, 3])
    by_slot = [rerotate(keys[:, :, [i]], s, FREQ) for i, s in enumerate(shifts.tolist())]
    assert torch.equal(rerotate(keys, shifts, FREQ), torch.cat(by_slot, dim=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    keys = _keys(dtype)
    assert torch.equal(rerotate(keys, 100, FREQ), rerotate(keys.float(), 100, FREQ).to(dtype))


def test_dimensions_beyond_the_rotary_ones_stay():
    keys = _keys()
    moved = rerotate(keys, 3, FREQ[:1])
    assert torch.equal(moved[..., 2:], keys[..., 2:])
    assert torch.equal(moved[..., :2], rerotate(keys[..., :2], 3, FREQ[:1]))
    assert not torch.allclose(moved[..., :2], keys[..., :2], atol=0.1)
