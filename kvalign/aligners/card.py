"""The model card of an aligner: what it is, what it was made for and from, and how well it did.

It is written from the config alone. `training` may hold one dict a part (the network kind: `key`
and `value`); of these the card prints what it knows: `val_loss`, `input_label_mse`, `ratio`,
`num_steps`, `seconds`, `device`, `command`, `versions` and `data`, and of tables `objective`,
`val_nll` and `val_nll_stale`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from kvalign import checkpoints

if TYPE_CHECKING:
    from kvalign.aligners.base import AlignerConfig

_CARD = """---
{metadata}
---

# KV-Align aligner for {base_model}

When a streaming language model evicts entries from its KV cache, the entries that stay move to
smaller positions. This aligner (kind `{kind}`) corrects their keys and values.
It fits {base_model} only: the model is checked when the aligner is used.

```bash
kvalign generate --model {base_model} --aligner THIS_FOLDER --prompt "The history of the island"
```

| made for | |
|---|---|
{made_for}

## Results

{results}

## How it was made

{made}

## Limits

{tested} A low error does not mean a low perplexity after many evictions: measure that with
`kvalign eval perplexity`.

## Licence

{licence}; the base model has its own licence.
"""

_OWN = (
    "apache-2.0",
    "Apache-2.0 for this aligner",
    "Tested on validation chunks of its data only.",
)
_IMPORTED = ("other", "The weights are their authors', and so is the licence", "Not tested here.")


def card_text(config: "AlignerConfig") -> str:
    """The whole card, with the metadata that the hub reads."""
    parts = {name: part for name, part in config.training.items() if isinstance(part, dict)}
    made_for = {
        "base model": config.base_model,
        "positions": config.family,
        "layers, KV heads": f"{config.num_layers}, {config.num_kv_heads} of size {config.head_dim}",
        "caches": f"up to {config.chunk_len - 1} entries; recorded with {config.num_sinks} sinks",
        "evicted at once": f"multiples of {', '.join(map(str, config.shifts))}",
        "sizes": ", ".join(f"{name} {size}" for name, size in config.sizes.items()) or "none",
    }
    imported = any("licence" in dict(part.get("data") or {}) for part in parts.values())
    license_tag, licence, tested = _IMPORTED if imported else _OWN
    metadata = ModelCardData(
        license=license_tag,
        library_name="kvalign",
        tags=["kv-cache", "kvalign"],
        base_model=config.base_model if _is_hub_id(config.base_model) else None,
        datasets=_datasets(parts) or None,
    )
    return _CARD.format(
        metadata=metadata.to_yaml(),
        licence=licence,
        tested=tested,
        base_model=config.base_model,
        kind=config.kind,
        made_for="\n".join(f"| {name} | {value} |" for name, value in made_for.items()),
        results="\n".join(_results(parts)) or "Not recorded.",
        made="\n\n".join("\n".join(_made(name, part)) for name, part in parts.items())
        or "Not recorded.",
    )


def _results(parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    measured = {name: part for name, part in parts.items() if "val_loss" in part}
    if not measured:
        return
    yield "Mean squared error per number on validation rows; `ratio` is the error as a share of the"
    yield "error without realignment, lower is better. A part that does no better than nothing is"
    yield "not used: it leaves its entries as they are.\n"
    yield "| part | realigned | unchanged | ratio | used |\n|---|---|---|---|---|"
    for name, part in measured.items():
        numbers = (part.get(column) for column in ("val_loss", "input_label_mse", "ratio"))
        line = f"| {name} | " + " | ".join("" if x is None else f"{x:.4g}" for x in numbers)
        yield line + (" | yes |" if part.get("used", True) else " | no |")
    losses = {(p["val_nll_stale"], p["val_nll"]) for p in measured.values() if "val_nll" in p}
    for stale, aligned in losses:
        yield "\nLoss of streamed validation text, nats a token: "
        yield f"{stale:.4f} without it, {aligned:.4f} with it."


def _made(name: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"{name}:\n"
    if "command" in part:
        yield f"- `{part['command']}`"
    seconds, device = part.get("seconds", 0), part.get("device", "an unknown device")
    if "num_steps" in part:
        objective = f" on {part['objective']}" if "objective" in part else ""
        yield f"- {part['num_steps']} steps{objective} in {seconds:.3g} s on {device}"
    for field in ("data", "versions"):
        if isinstance(part.get(field), dict):
            yield f"- {field}: " + ", ".join(f"{key} {value}" for key, value in part[field].items())


def _datasets(parts: dict[str, dict[str, Any]]) -> list[str]:
    """The data sets of the hub among the corpora that the parts were trained on."""
    from kvalign.data_gen.corpora import HUB

    found = set()
    for part in parts.values():
        for spec in dict(part.get("data") or {}).get("corpus") or ():
            kind, _, name = str(spec).removeprefix("marked:").partition(":")
            name = HUB[kind].name if kind in HUB else name.partition(":")[0] * (kind == "hub")
            if _is_hub_id(name):
                found.add(name)
    return sorted(found)


def _is_hub_id(name: str) -> bool:
    known_here = name in checkpoints.MODELS or Path(name).exists()
    return not known_here and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
