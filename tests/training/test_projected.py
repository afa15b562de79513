"""Tables of projected position embeddings: no training."""

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import CONTEXT_LEN, KINDS

from kvalign.aligners import TableAligner
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import FAMILIES, spec_of
from kvalign.training.table_run import project_positions

LEARNED = [kind for kind in KINDS if FAMILIES[kind] == "learned"]


def projected(model) -> TableAligner:
    table = tables(model)
    project_positions(table, model, spec_of(model.config, "tiny"), ("key", "value"))
    return table


def test_means_are_the_layers_own_projections(models):
    model = models["gpt2"]
    table, positions = projected(model), model.transformer.wpe.weight[:CONTEXT_LEN]
    for layer, block in enumerate(model.transformer.h):
        for i, kv in ((1, "key"), (2, "value")):
            size = model.config.n_embd
            weight = block.attn.c_attn.weight[:, i * size : (i + 1) * size]
            expected = (positions - positions[0]) @ weight
            means = getattr(table, kv)[layer].transpose(0, 1).flatten(1)
            assert torch.allclose(means - means[0], expected, atol=1e-5)
    assert (table.key_scale == 1).all()


@pytest.mark.parametrize("arch", LEARNED)
def test_every_layer_of_learned_positions_has_its_own(models, arch):
    table = projected(models[arch])
    moves = table.key - table.key[:, :, :1]
    assert moves.isfinite().all() and (moves[:, :, 1:].abs().amax((1, 3)) > 0).all()
    assert not torch.allclose(moves[0], moves[1])


def test_other_positions_are_refused(models):
    with pytest.raises(UserError, match="for learned positions, not rotary ones"):
        projected(models["llama"])
