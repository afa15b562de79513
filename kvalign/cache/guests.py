"""Guests of the cache: what it works without, and imports only where sizes or models ask for it."""

from typing import Any

from kvalign.foundation.registry import Registry

GUESTS: Registry[Any] = Registry(
    "guest of the cache",
    {
        "any-slot": "kvalign.cache.any_slot_cache:AnySlotCache",
        "int8": "kvalign.cache.int8:Int8",
        "kernel": "kvalign.cache.by_kernel:reader_of",
        "memory": "kvalign.memory.memories:Memories",
        "memory-plan": "kvalign.memory.plan:as_planned",
        "memory-sizes": "kvalign.memory.sizes:num_recalled_of",
        "state": "kvalign.cache.state_layer:StateLayer",
        "restored-states": "kvalign.cache.state_layer:restore_states",
    },
)
