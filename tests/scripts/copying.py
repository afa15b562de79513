"""How well models copy from their context: they read a passage twice, and their loss the first time
is set beside that the second time.

    python tests/scripts/copying.py --models gpt2-mini,context-gpt2

Prints one JSON document with a row for each model. Each passage stands alone in its row.
"""

import json
import sys
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option
from kvalign.models.loading import load_model


@dataclass(frozen=True, kw_only=True)
class CopyingSettings(Settings):
    """Measure how much less a passage costs the second time."""

    models: tuple[str, ...] = option(("gpt2-mini", "context-gpt2"), help="models, comma-separated")
    corpus: str = option("python-docs", help="its test part has the passages")
    passage_len: int = option(128, help="tokens of a passage", at_least=2)
    num_passages: int = option(64, help="passages, one after the other", at_least=1)


def measure(settings: CopyingSettings) -> dict:
    """A document of nats per token, the first and the second time."""
    started, rows = time.perf_counter(), []
    for name in settings.models:
        loaded = load_model(name, dtype="float32")
        num_ids = settings.num_passages * settings.passage_len
        ids = first_ids(settings.corpus, loaded.tokenizer, num_ids, "--num-passages")
        passages = torch.tensor(ids).view(settings.num_passages, -1)
        twice = torch.cat([passages, passages], 1)
        with torch.inference_mode():
            logits = loaded.model(input_ids=twice, use_cache=False).logits[:, :-1].float()
        losses = cross_entropy(logits.transpose(1, 2), twice[:, 1:], reduction="none")
        # The first token of the first time has nothing before it, so it counts in neither.
        first, second = losses.split([settings.passage_len - 1, settings.passage_len], 1)
        rows.append({"model": name, "first": first.mean().item()})
        rows[-1]["second"] = second[:, 1:].mean().item()
    return document("script copying", settings, rows, started=started)


if __name__ == "__main__":
    settings, _ = parse(CopyingSettings, sys.argv[1:], "python tests/scripts/copying.py")
    print(json.dumps(measure(settings)))
