"""The card of a language model trained by `kvalign pretrain`."""

import platform
from importlib.metadata import version
from typing import Any

import jinja2

from kvalign.training.settings import PretrainSettings

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [kvalign, reference-model]
---

# A {{ settings.arch }} reference model for KV-Align

A small causal language model ({{ "%.1f" | format(facts.num_parameters / 1e6) }} M parameters) trained from scratch so that KV-Align's
commands, tests and examples need no hub. It writes simple prose in the style of its corpora and
knows nothing reliable: use it to study caches, not to answer questions.

| | |
|---|---|
| architecture | {{ settings.arch }}: {{ settings.num_layers }} layers, hidden {{ settings.hidden_size }}, heads of 64 dimensions, context {{ settings.context_len }}, byte-level BPE of {{ settings.vocab_size }} tokens |
| corpora (share of the tokens) | {{ settings.corpus | join(", ") }} |
| tokens seen | {{ "{:,}".format(facts.tokens_seen) }} |
| training loss at the end | {{ "%.3f" | format(facts.train_loss_nats) }} nats a token (mean of about 50 steps) |
| evaluation | {% if "bits_per_byte" in facts %}{{ "%.3f" | format(facts.bits_per_byte) }} bits per byte on the first 60 x {{ settings.context_len }} tokens of {{ settings.eval_corpus }}{% else %}none{% endif %} |
| hardware and time | {{ settings.device }} ({{ machine }}), {{ settings.num_threads or "all" }} threads, {{ "%.1f" | format(facts.train_seconds / 3600) }} hours |
| versions | torch {{ version("torch") }}, transformers {{ version("transformers") }} |
| licence | Apache-2.0; the corpora are not included |

Made by

```
{{ settings.command_line("pretrain") }}
```
"""


def card(settings: PretrainSettings, facts: dict[str, Any]) -> str:
    """The README of a model folder, from its settings and what `pretrain` measured."""
    template = jinja2.Template(_CARD, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return template.render(
        settings=settings, facts=facts, machine=platform.machine(), version=version
    )
