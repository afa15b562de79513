"""Policies: which entry of a full cache is evicted. Each is a class, and has one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign.foundation.registry import Registry

if TYPE_CHECKING:
    from kvalign.policies.base import Policy

OLDEST = "oldest"

POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    {
        OLDEST: "kvalign.policies.of_entries:Oldest",
        "random": "kvalign.policies.of_entries:Random",
        "key-norm": "kvalign.policies.of_entries:KeyNorm",
        "keydiff": "kvalign.policies.of_entries:KeyDiff",
        "tova": "kvalign.policies.of_attention:Tova",
        "h2o": "kvalign.policies.of_attention:H2O",
        "second-chance": "kvalign.policies.of_attention:SecondChance",
    },
)
"""Policy classes by their names on the command line."""
