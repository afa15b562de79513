"""Settings of every evaluation."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.cache.sizes import OF_MEMORY, CacheSizes, num_evicted_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import (
    MOST_SEED,
    ModelSettings,
    Settings,
    flag,
    like,
    option,
)
from kvalign.methods.registry import METHODS
from kvalign.policies import OLDEST

SEVERAL = "; several, comma-separated"


def seed_option(of: str, default: int = 0) -> int:
    seed: int = option(default, help=f"seed of {of}", at_least=0, at_most=MOST_SEED)
    return seed


def plot_option(what: str) -> Path | None:
    path: Path | None = option(None, help=f"also draw {what} (.png or .svg)", writes="file")
    return path


KEEP_PARTS: Path | None = option(
    None,
    help="folder that keeps each part as it ends (latency: a cache size; readability: a passage); "
    "parts in it are not made again",
    writes="folder",
)


@dataclass(frozen=True, kw_only=True)
class ResultSettings(Settings):
    """Base of the settings of everything that makes a document of results."""

    out: Path | None = option(
        None, help="also write the document, as --json prints it, to a .json file", writes="file"
    )
    csv: Path | None = option(
        None, help="also write the table, a line for each row, to a .csv file", writes="file"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        endings = {"out": (".json",), "csv": (".csv",), "plot": (".png", ".svg")}
        for name, of_file in endings.items():
            path: Path | None = getattr(self, name, None)
            if path and path.suffix not in of_file:
                raise UserError(
                    f"{flag(name)} takes a path ending in {' or '.join(of_file)}, got {str(path)!r}"
                )


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(ResultSettings, ModelSettings):
    """Base of the settings of evaluations: methods and sizes."""

    num_sinks: tuple[int, ...] | None = option(
        None,
        help="first entries that are never evicted, of all methods but window; several, "
        "comma-separated (default: the most that an aligner has; without one, the most that a "
        "method has by default)",
        at_least=0,
    )
    protocol: str = option(
        "common",
        help="common: all methods have equal sinks, and perplexities the same labels at all cache "
        "sizes; paper: as in the KV-Align paper, each method has its own default of sinks, and "
        "each cache size its own labels",
        choices=("common", "paper"),
    )
    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated; the default leaves out those that lack an aligner",
    )
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: "
        "shipped; without one, the newest in kvalign-data/MODEL)",
    )
    cache_sizes: tuple[int, ...] = option(
        (64,), help="entries the cache keeps, sinks included, comma-separated", at_least=1
    )
    num_evicted: tuple[str, ...] | None = like(
        CacheSizes,
        "num_evicted",
        more=f": a number, or half of the window (default: 1; discard-half: half){SEVERAL}",
    )
    realign_every: tuple[int, ...] = like(CacheSizes, "realign_every", (1,), more=SEVERAL)
    policy: tuple[str, ...] = like(CacheSizes, "policy", (OLDEST,), more=SEVERAL)
    num_recent: tuple[int, ...] | None = like(CacheSizes, "num_recent", more=SEVERAL, at_least=0)
    positions: tuple[str, ...] = like(CacheSizes, "positions", ("compact",), more=SEVERAL)
    cache_dtype: tuple[str, ...] = like(CacheSizes, "cache_dtype", ("model",), more=SEVERAL)
    memory: tuple[int, ...] = like(CacheSizes, "memory", (0,), more=SEVERAL)
    num_recalled: tuple[int, ...] | None = like(
        CacheSizes, "num_recalled", more=SEVERAL, at_least=1
    )
    recall_places: str | None = like(CacheSizes, "recall_places")
    recall_layers: str | None = like(CacheSizes, "recall_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            if name not in METHODS:
                raise UserError(unknown("method", name, METHODS))
        if not any(self.memory) and {*OF_MEMORY[1:]} & {*self.changed()}:
            raise UserError(
                f"{', '.join(map(flag, OF_MEMORY[1:]))} need a memory: give --memory, too"
            )
        for number in self.num_evicted or ():
            num_evicted_of(number, 2)
        reference = getattr(self, "reference", None)
        if reference and reference not in self.methods and "reference" in self.changed():
            raise UserError(f"--reference {reference} is not among --methods")
