"""`kvalign tune-memory`: measure what the memory of a model gives back, and how."""

from typing import Any

from kvalign.training.settings import TuneMemorySettings


def tune_memory(settings: TuneMemorySettings, as_json: bool) -> dict[str, Any]:
    from kvalign import training
    from kvalign.foundation.console import Heading, print_table

    result = training.tune_memory(settings)
    if as_json:
        return result
    names = ("places", "layers", "relative to no memory", "relative to the usual way")
    print_table(
        [Heading(name, is_number=i > 1) for i, name in enumerate(names)],
        [
            [
                row["recall_places"] or "no memory",
                row["recall_layers"] or "",
                _ratio(row, "by_none"),
                _ratio(row, "by_usual"),
            ]
            for row in result["rows"]
        ],
    )
    plan = result["plan"]
    print(
        f"layers {plan['recall_layers']} take entries back, by {plan['recall_places']}: "
        f"{result['file']}"
    )
    return result


def _ratio(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3f}" + ("" if high is None else f" ({low:.3f} to {high:.3f})")
