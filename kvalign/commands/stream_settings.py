"""The flags that every command which streams has: model and cache."""

from dataclasses import dataclass

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class StreamSettings(Settings):
    """Base of the settings of `generate` and of the evaluations."""

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
