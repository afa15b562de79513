"""Policies: which entry of a full cache is evicted. Each is a class, and has one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign.foundation.names import Registry

if TYPE_CHECKING:
    from kvalign.policies.base import Policy

OLDEST = "oldest"

POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    {
        OLDEST: "kvalign.policies.ours:Oldest",
        "random": "kvalign.policies.ours:Random",
        "key-norm": "kvalign.policies.ours:KeyNorm",
        "keydiff": "kvalign.policies.ours:KeyDiff",
        "tova": "kvalign.policies.ours:Tova",
        "h2o": "kvalign.policies.ours:H2O",
        "second-chance": "kvalign.policies.ours:SecondChance",
    },
)
"""Policy classes by their names on the command line."""
