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
        OLDEST: "kvalign.policies.base:Oldest",
        "random": "kvalign.policies.base:Random",
        "key-norm": "kvalign.policies.base:KeyNorm",
        "keydiff": "kvalign.policies.base:KeyDiff",
        "tova": "kvalign.policies.base:Tova",
        "h2o": "kvalign.policies.base:H2O",
        "second-chance": "kvalign.policies.base:SecondChance",
    },
)
"""Policy classes by their names on the command line."""
