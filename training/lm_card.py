"""The card of a language model that `kvalign pretrain` made."""

import platform
from importlib.metadata import version
from typing import Any

from kvalign.training.settings import PretrainSettings

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [kvalign, reference-model]
---

# A {arch} reference model for KV-Align

A small causal language model ({millions:.1f} M parameters) trained from scratch so that KV-Align's
commands, tests and examples need no hub. It writes simple prose in the style of its corpora and
knows nothing reliable: use it to study caches, not to answer questions.

| | |
|---|---|
| architecture | {arch}: {num_layers} layers, hidden {hidden_size}, heads of 64 dimensions, context {context_len}, byte-level BPE of {vocab_size} tokens |
| corpora (share of the tokens) | {corpora} |
| tokens seen | {tokens_seen:,} |
| training loss at the end | {train_loss_nats:.3f} nats a token (mean of about 50 steps) |
| evaluation | {evaluation} |
| hardware and time | {hardware}, {hours:.1f} hours |
| versions | torch {torch}, transformers {transformers} |
| licence | Apache-2.0; the corpora are not included |

Made by

```
{command}
```
"""


def card(settings: PretrainSettings, facts: dict[str, Any]) -> str:
    """The README of a model folder, from its settings and what `pretrain` measured."""
    evaluation = "none"
    if "bits_per_byte" in facts:
        blocks = f"first 60 x {settings.context_len} tokens of {settings.eval_corpus}"
        evaluation = f"{facts['bits_per_byte']:.3f} bits per byte on the {blocks}"
    shape = ("arch", "num_layers", "hidden_size", "context_len", "vocab_size")
    return _CARD.format(
        **{name: getattr(settings, name) for name in shape},
        **{name: facts[name] for name in ("tokens_seen", "train_loss_nats")},
        millions=facts["num_parameters"] / 1e6,
        corpora=", ".join(settings.corpus),
        evaluation=evaluation,
        hardware=f"{settings.device} ({platform.machine()}), {settings.num_threads or 'all'} threads",
        hours=facts["train_seconds"] / 3600,
        torch=version("torch"),
        transformers=version("transformers"),
        command=settings.command_line("pretrain"),
    )
