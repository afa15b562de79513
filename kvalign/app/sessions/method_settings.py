"""The settings of a method, which commands share that stream with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from kvalign.cache.sizes import Positions, num_evicted_of
from kvalign.foundation.settings import NUM_EVICTED, NUM_RECENT, POLICY, POSITIONS, Settings, option
from kvalign.methods import AUTO
from kvalign.policies import OLDEST, POLICIES

SIZES = ("num_evicted", "realign_every", "policy", "num_recent", "positions")


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """Base of the settings of commands that stream with a method."""

    method: str = option(AUTO, help="streaming method (kvalign methods); auto: what fits the model")
    cache_size: int = option(128, help="entries the cache keeps, sinks included", at_least=1)
    num_evicted: str | None = option(None, help=NUM_EVICTED)
    realign_every: int | None = option(
        None,
        help="evicted entries after which kvalign moves those that stay (default: 1)",
        at_least=1,
    )
    policy: str | None = option(None, help=f"{POLICY}; default: {OLDEST}", choices=POLICIES)
    num_recent: int | None = option(None, help=NUM_RECENT, at_least=0)
    positions: str | None = option(
        None, help=f"{POSITIONS} (default: compact)", choices=get_args(Positions)
    )
    aligner: str | None = option(
        None, help="aligner of kvalign: folder, hub id or shipped name (default: shipped)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        num_evicted_of(self.num_evicted or 1, 2)

    def sizes(self) -> dict[str, Any]:
        """What the flags say of what is evicted and moved, as `make_method` takes it."""
        return {name: getattr(self, name) for name in SIZES}
