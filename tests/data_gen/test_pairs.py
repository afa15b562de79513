"""Recorded pairs are plain encodings."""

import pytest
import torch
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import KINDS, VOCAB, tiny_model
from transformers import PreTrainedModel

from kvalign.data_gen.pairs import record_pairs
from kvalign.models.architectures import rotation_of, spec_of
from kvalign.models.loading import LoadedModel
from kvalign.models.rope import rerotate


def loaded(model: PreTrainedModel) -> LoadedModel:
    return LoadedModel(model, byte_tokenizer(VOCAB, TEXT), spec_of(model.config, "tiny"))


def _encode(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values of one chunk [T], by the whole model and its own cache: [L, H, T, D] each."""
    layers = model(input_ids=ids[None], use_cache=True).past_key_values.layers
    return [torch.cat([getattr(x, name) for x in layers]) for name in ("keys", "values")]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_plain_encodings(models, kind):
    model, num_sinks, shift = models[kind], 4, 3
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    pairs = record_pairs(loaded(model), ids, num_sinks, (1, shift))[shift]
    for row, chunk in enumerate(ids):
        key_stale, value_stale = (x[..., 7:, :] for x in _encode(model, chunk))
        rest = torch.tensor([*chunk[:4].tolist(), *chunk[7:].tolist()])
        key_aligned, value_aligned = (x[..., 4:, :] for x in _encode(model, rest))
        if hasattr(model.base_model, "rotary_emb"):
            key_stale = rerotate(key_stale, shift, rotation_of(model).inv_freq)
        expected = (key_stale, key_aligned, value_stale, value_aligned)
        for a, b in zip(pairs, expected, strict=True):
            assert a.shape == (2, *b.shape)
            assert torch.allclose(a[row], b, atol=1e-4)


def test_sliding_window_layers_keep_every_entry():
    model = tiny_model("mistral", sliding_window=8)
    ids = torch.arange(20)[None]
    assert record_pairs(loaded(model), ids, 4, (1,))[1][0].shape[3] == 15
