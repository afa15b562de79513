"""Controls of the live page: their labels, explanations and limits."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import gradio as gr

from kvalign.aligners import Aligner
from kvalign.app.sessions.stream_settings import StreamSettings
from kvalign.cache.sizes import Positions
from kvalign.foundation.errors import UserError
from kvalign.methods.choice import aligners_at_hand
from kvalign.methods.registry import METHODS
from kvalign.models.loading import LoadedModel
from kvalign.policies import OLDEST, POLICIES
from kvalign.streaming.sampling import Sampling

LABELS = {
    "cache_size": "Cache size",
    "num_evicted": "Evicted at once",
    "max_new_tokens": "New tokens",
    "temperature": "Temperature",
    "top_k": "Top-k",
    "top_p": "Top-p",
    "min_p": "Min-p",
    "repetition_penalty": "Repetition penalty",
    "seed": "Seed",
}
"""Labels of a stream's settings on the page."""
_WORDS = {
    "num_sinks": "sinks",
    "chunk_len": "chunks of",
    "realign_every": "evictions before a move",
    "num_recent": "newest entries that stay",
    "num_recalled": "entries taken back",
}
"""Names in errors that have no control on the page."""
_SAMPLING: dict[str, tuple[float, float, float]] = {  # least, most, step
    "temperature": (0, 2, 0.05),
    "top_k": (0, 200, 1),
    "top_p": (0.05, 1, 0.05),
    "min_p": (0, 0.5, 0.01),
    "repetition_penalty": (1, 2, 0.05),
}
SAMPLING = tuple(_SAMPLING)
LEAST_ENTRIES, MOST_ENTRIES = 8, 1024
MOST_EVICTED = 128
_HELP = {field.name: field.metadata["help"] for field in fields(StreamSettings)}


def slider(
    name: str, least: float, most: float, value: float, step: float = 1, **more: Any
) -> gr.Slider:
    """Control for a setting, with the command line's help unless `more` has `info`."""
    more = {"label": LABELS[name], "info": _HELP[name], **more}
    return gr.Slider(least, most, value, step=step, **more)


def sampling_sliders() -> list[gr.Slider]:
    """One for each of `SAMPLING`, with the command line's defaults."""
    return [
        slider(name, least, most, getattr(Sampling, name), step)
        for name, (least, most, step) in _SAMPLING.items()
    ]


def memory_switch(memory: int, is_on: bool, methods: Sequence[str]) -> gr.Checkbox:
    """Return the switch for a memory, which stores evicted entries."""
    return gr.Checkbox(
        is_on,
        label="Memory",
        info=f"of {memory} evicted tokens; {_without(methods)}",
        elem_id="memory",
    )


def eviction(methods: Sequence[str]) -> list[gr.Dropdown]:
    """Controls of the entries to evict, and of the positions of the others."""
    return [
        gr.Dropdown(
            list(POLICIES), value=OLDEST, label="Policy", info=_without(methods), min_width=80
        ),
        gr.Dropdown(
            list(get_args(Positions)),
            label="Positions",
            info="of the entries that stay",
            min_width=80,
        ),
    ]


def _without(methods: Sequence[str]) -> str:
    """Methods that have their own way to evict."""
    return ", ".join(name for name in methods if not METHODS[name].takes_policy) + ": none"


def labelled(line: str) -> str:
    """Error message with the page's labels instead of flags."""
    names = LABELS | _WORDS
    return re.sub(rf"\b({'|'.join(names)})\b", lambda name: names[name[0]], line)


def aligners_of(loaded: LoadedModel, own: str | None = None) -> list[str]:
    """Aligners for a model: `own`, the default, other shipped ones, the last trained here."""
    return list(dict.fromkeys([*filter(None, [own]), *aligners_at_hand(loaded.model)]))


def most_entries(loaded: LoadedModel, methods: Sequence[str], aligner: str | None) -> int:
    """The largest cache for which the model, and the aligner if one is used, has positions."""
    ends = [MOST_ENTRIES]
    if loaded.spec.context_len is not None:
        ends.append(loaded.spec.context_len - 1)
    if (config := _config(methods, aligner)) is not None:
        ends.append(config.chunk_len - 1)
    return max(LEAST_ENTRIES, min(ends))


def most_evicted(cache_size: int, methods: Sequence[str], aligner: str | None) -> int:
    """The smallest window among the methods with a setting for the number evicted at once."""
    config = _config(methods, aligner)
    classes = [METHODS[name] for name in methods if "num_evicted" not in METHODS[name].fixed]
    sinks = [
        config.num_sinks if cls.takes_aligner and config else cls.default_num_sinks
        for cls in classes
    ]
    return max(1, min(cache_size - max(sinks, default=0), MOST_EVICTED))


def up_to(most: int, value: float) -> dict[str, Any]:
    """New end of a slider, and its value if it exceeded that."""
    return gr.update(maximum=most, value=most) if value > most else gr.update(maximum=most)


def _config(methods: Sequence[str], aligner: str | None) -> Any:
    """Config of the aligner, if a method uses it and it can be read."""
    if not aligner or not any(METHODS[name].takes_aligner for name in methods):
        return None
    try:
        return Aligner.from_pretrained(aligner).config
    except UserError:  # said where the method would write
        return None
