"""The model card of an aligner: what it is, what it was made for and from, and how well it did.

It is written from the config alone. `training` may hold one dict a part (the network kind: `key`
and `value`); of these the card prints what it knows: `val_loss`, `input_label_mse`, `ratio`,
`used`, `num_steps`, `seconds`, `device`, `command`, `versions` and `data`, and of tables
`objective`, `val_nll` and `val_nll_stale`.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from huggingface_hub import ModelCardData

from kvalign import checkpoints

if TYPE_CHECKING:
    from kvalign.aligners.base import AlignerConfig

_CARD = """---
{{ metadata }}
---

# KV-Align aligner for {{ config.base_model }}

When a streaming language model evicts entries from its KV cache, the entries that stay move to
smaller positions. This aligner (kind `{{ config.kind }}`) corrects their keys and values.
It fits {{ config.base_model }} only: the model is checked when the aligner is used.

```bash
kvalign generate --model {{ config.base_model }} --aligner THIS_FOLDER --prompt "The history of the island"
```

| made for | |
|---|---|
| base model | {{ config.base_model }} |
| positions | {{ config.family }} |
| layers, KV heads | {{ config.num_layers }}, {{ config.num_kv_heads }} of size {{ config.head_dim }} |
| caches | up to {{ config.chunk_len - 1 }} entries; recorded with {{ config.num_sinks }} sinks |
| evicted at once | multiples of {{ config.shifts | join(", ") }} |
| sizes | {{ listed(config.sizes) or "none" }} |

## Results

{% for name, part in parts.items() if "val_loss" in part %}
{% if loop.first %}
Mean squared error per number on validation rows; `ratio` is the error as a share of the
error without realignment, lower is better. A part that does no better than nothing is
not used: it leaves its entries as they are.

| part | realigned | unchanged | ratio | used |
|---|---|---|---|---|
{% endif %}
| {{ name }} |
{%- for column in ("val_loss", "input_label_mse", "ratio") %} {{ number(part.get(column)) }} |{% endfor %} {{ "yes" if part.get("used", True) else "no" }} |
{% else %}
Not recorded.
{% endfor %}
{% for stale, aligned in losses %}

Loss of streamed validation text, nats a token: {{ "%.4f" | format(stale) }} without it, {{ "%.4f" | format(aligned) }} with it.
{% endfor %}

## How it was made

{% for name, part in parts.items() %}
{{ name }}:

{% if "command" in part %}
- `{{ part.command }}`
{% endif %}
{% if "num_steps" in part %}
- {{ part.num_steps }} steps{{ " on " ~ part.objective if "objective" in part }} in {{ "%.3g" | format(part.seconds or 0) }} s on {{ part.device or "an unknown device" }}
{% endif %}
{% for field in ("data", "versions") if part[field] is mapping %}
- {{ field }}: {{ listed(part[field]) }}
{% endfor %}

{% else %}
Not recorded.

{% endfor %}
## Limits

{{ "Not tested here." if imported else "Tested on validation chunks of its data only." }} A low error does not mean a low perplexity after many evictions: measure that with
`kvalign eval perplexity`.

## Licence

{{ "The weights are their authors', and so is the licence" if imported else "Apache-2.0 for this aligner" }}; the base model has its own licence.
"""  # noqa: E501


def card_text(config: "AlignerConfig") -> str:
    """The whole card, with the metadata that the hub reads."""
    parts = {name: part for name, part in config.training.items() if isinstance(part, dict)}
    data = [part["data"] for part in parts.values() if isinstance(part.get("data"), dict)]
    imported = any("licence" in entry for entry in data)
    metadata = ModelCardData(
        license="other" if imported else "apache-2.0",
        library_name="kvalign",
        tags=["kv-cache", "kvalign"],
        base_model=config.base_model if _is_hub_id(config.base_model) else None,
        datasets=sorted({name for entry in data for name in _datasets(entry)}) or None,
    )
    losses = {(p["val_nll_stale"], p["val_nll"]) for p in parts.values() if "val_nll" in p}
    template = jinja2.Template(
        _CARD, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return template.render(
        metadata=metadata.to_yaml(),
        config=config,
        parts=parts,
        losses=losses,
        imported=imported,
        listed=_listed,
        number=lambda x: "" if x is None else f"{x:.4g}",
    )


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value != [])


def _datasets(data: dict[str, Any]) -> list[str]:
    """The data sets of the hub that a part was trained on; of parts recorded before they were
    listed, those that a corpus names itself.
    """
    if "datasets" in data:
        return [name for name in map(str, data["datasets"]) if _is_hub_id(name)]
    specs = [str(spec).removeprefix("marked:") for spec in data.get("corpus") or ()]
    names = [spec.split(":")[1] for spec in specs if spec.startswith("hub:")]
    return [name for name in names if _is_hub_id(name)]


def _is_hub_id(name: str) -> bool:
    known_here = name in checkpoints.MODELS or Path(name).exists()
    return not known_here and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
