"""The flags that commands share: of every one that streams, and of those that compare methods."""

from dataclasses import dataclass

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class StreamSettings(Settings):
    """Base of the settings of `generate` and of the evaluations: model and cache."""

    model: str = option("gpt2-mini", help="shipped name, hub id or folder of a causal LM")
    num_sinks: int | None = option(
        None,
        help="first entries that stay (default: 4; window, recompute: 0; kvalign: the aligner's)",
        at_least=0,
    )
    dtype: str = option(
        "float32", help="precision of the model", choices=("float32", "bfloat16", "float16")
    )
    device: str = option("cpu", help="cpu, cuda, mps, ...")


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(StreamSettings):
    """Base of the settings of the evaluations: which methods, at which sizes."""

    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated",
    )
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: shipped)",
    )
    cache_sizes: tuple[int, ...] = option(
        (64,), help="entries the cache keeps, sinks included, comma-separated", at_least=1
    )
    num_evicted: tuple[str, ...] | None = option(
        None,
        help="entries evicted at once, comma-separated numbers or half (of the cache) "
        "(default: 1; discard-half: half the window)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in self.num_evicted or ():
            if number != "half" and not (number.isascii() and number.isdigit()):
                raise ValueError(f"--num-evicted takes numbers or half, got {number!r}")
