"""The arithmetic of eviction, against dropping entries one by one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvalign.cache.sizes import CacheSizes


@given(st.integers(1, 40), st.data())
def test_num_dropped_is_what_repeated_evictions_drop(cache_size, data):
    num_sinks = data.draw(st.integers(0, cache_size - 1))
    num_evicted = data.draw(st.integers(1, cache_size - num_sinks))
    sizes = CacheSizes(cache_size, num_sinks, num_evicted)
    numbers = torch.arange(3 * cache_size)
    for num_entries, of_tensor in zip(
        numbers.tolist(), sizes.num_dropped(numbers).tolist(), strict=True
    ):
        left = num_entries
        while left > cache_size:
            left -= num_evicted
        assert sizes.num_dropped(num_entries) == of_tensor == num_entries - left
