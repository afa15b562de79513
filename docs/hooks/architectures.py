"""Table of architectures, from the code's own table."""

from transformers import AutoConfig

from kvalign.models.architectures import FAMILIES, window_of
from kvalign.models.attention import OWN_ATTENTION


def table() -> str:
    """A row an architecture."""
    rows = ["| architecture | positions | layers see | attention |", "|---|---|---|---|"]
    for kind, family in FAMILIES.items():
        own = OWN_ATTENTION.get(kind)
        attention = f"its own: {own}" if own else "of the registry"
        rows.append(f"| `{kind}` | {family} | {_sight(kind)} | {attention} |")
    return "\n".join(rows) + "\n"


def _sight(kind: str) -> str:
    """Return what layers see, by the config that transformers makes where nothing is said."""
    config = AutoConfig.for_model(kind)
    kinds, window = {*(getattr(config, "layer_types", None) or ())}, window_of(config)
    if "chunked_attention" in kinds:
        return f"all, or a chunk of {config.attention_chunk_size}"
    if window is None:
        return "all"
    return f"all, or {window}" if "full_attention" in kinds else f"{window}"
