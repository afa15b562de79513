"""Controls of the live page: their labels, explanations and limits."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import gradio as gr

from kvalign.app.sessions.stream_settings import StreamSettings
from kvalign.cache.sizes import Positions
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


def most_entries(loaded: LoadedModel) -> int:
    """The largest cache for which the model has positions."""
    ends = [MOST_ENTRIES]
    if loaded.spec.context_len is not None:
        ends.append(loaded.spec.context_len - 1)
    return max(LEAST_ENTRIES, min(ends))
