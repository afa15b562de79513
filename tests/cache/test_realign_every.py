"""How many evictions entries may wait until they are moved."""

import pytest
import torch
from helpers.methods import CACHE_SIZE, anchored, tables
from helpers.tiny_models import CONTEXT_LEN

from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.methods.kvalign import KVAlign


@pytest.mark.parametrize(
    ("num_evicted", "most", "last_position"), [(1, 44, 63), (2, 44, 62), (3, 45, 62), (16, 48, 52)]
)
def test_positions_are_used_and_no_more_than_there_are(
    num_evicted, most, last_position, models, ids
):
    """Of a model of 64, whole evictions run on from a cache of 20."""
    model, aligner = models["gpt2"], tables(models["gpt2"], scale=0.5)
    sizes = CacheSizes(CACHE_SIZE, 4, num_evicted, most)
    method, highest = KVAlign(model, sizes, aligner=aligner), 0
    for i in range(ids.shape[1]):
        highest = max(highest, method.cache.get_seq_length())
        assert torch.isfinite(method.feed(ids[:, i : i + 1])).all()
    assert highest == sizes.last_position == last_position < CONTEXT_LEN
    chunks = KVAlign(model, sizes, aligner=anchored(model, scale=0.5))
    assert not chunks.is_exact and torch.isfinite(chunks.feed(ids)).all()
    with pytest.raises(UserError, match=f"realign_every must be at most {most} for ") as caught:
        KVAlign(model, CacheSizes(CACHE_SIZE, 4, num_evicted, most + 1), aligner=aligner)
    assert "\n" not in str(caught.value)


def test_where_it_has_no_effect_it_is_refused(models):
    model, aligner = models["llama"], tables(models["llama"])
    with pytest.raises(UserError, match="realign_every must be 1"):
        KVAlign(model, CacheSizes(CACHE_SIZE, 4, 1, 3), aligner=aligner)
    KVAlign(model, CacheSizes(CACHE_SIZE, 4, 1, 1), aligner=aligner)
