"""Model card of an aligner."""

import math
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from kvalign import checkpoints
from kvalign.aligners.base import AlignerConfig
from kvalign.foundation import hub
from kvalign.models import fetched


def card_text(config: AlignerConfig) -> str:
    """The whole card, with the metadata for the hub."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("kvalign.aligners"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["exp"] = math.exp
    parts = config.training
    data = [part["data"] for part in parts.values() if "data" in part]
    imported = any("licence" in entry for entry in data)
    datasets = {name for entry in data for name in entry.get("datasets", ()) if _is_hub_id(name)}
    metadata = ModelCardData(
        license="other" if imported else "apache-2.0",
        library_name="kvalign",
        tags=["kv-cache", "kvalign"],
        base_model=config.base_model if _is_hub_id(config.base_model) else None,
        datasets=sorted(datasets) or None,
    )
    judged = next((part["judged"] for part in parts.values() if "judged" in part), None)
    return templates.get_template("card.md.jinja").render(
        metadata=metadata.to_yaml(),
        config=config,
        parts=parts,
        judged=judged,
        set_name=_set_name,
        imported=imported,
        listed=_listing,
        number=lambda x: "" if x is None else f"{x:.4g}",
    )


def _set_name(parts: list[str]) -> str:
    """Set of parts in words: `keys and values`."""
    return " and ".join(f"{part}s" for part in parts) or "nothing (`streaming-llm`)"


def _listing(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in ([], {}))


def _is_hub_id(name: str) -> bool:
    known_here = name in (*checkpoints.MODELS, *fetched.MODELS) or Path(name).exists()
    return not known_here and hub.is_id(name)
