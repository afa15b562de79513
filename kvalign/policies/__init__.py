"""Policies: which entry of a full cache is evicted. Each has one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign.foundation.registry import Registry

if TYPE_CHECKING:
    from kvalign.policies.base import Policy

OLDEST = "oldest"

POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    {
        OLDEST: "kvalign.policies.oldest:Oldest",
        "random": "kvalign.policies.random:Random",
        "key-norm": "kvalign.policies.key_norm:KeyNorm",
        "keydiff": "kvalign.policies.keydiff:KeyDiff",
        "tova": "kvalign.policies.tova:Tova",
        "h2o": "kvalign.policies.h2o:H2O",
        "second-chance": "kvalign.policies.second_chance:SecondChance",
    },
)
"""Policy classes by their names on the command line."""
