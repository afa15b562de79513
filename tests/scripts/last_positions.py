"""Caches of nearly the context length: a table that may write at any position, and one that ends at
`last_position`, beside `discard-half`.

    python tests/scripts/last_positions.py --corpus text:test.txt
"""

import json
import math
import sys
import time
from dataclasses import dataclass

import torch

from kvalign import Aligner, load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.protocol.document import document
from kvalign.eval.protocol.statistics import interval
from kvalign.foundation.settings import Settings, option
from kvalign.streaming.scoring import score


@dataclass(frozen=True, kw_only=True)
class LastPositionsSettings(Settings):
    """Score a text with caches of these sizes."""

    aligner: str = option("kvalign-gpt2-mini-table-network", help="name or folder")
    corpus: str = option(help="text that is scored")
    cache_sizes: tuple[int, ...] = option((384, 448, 480, 496, 511), help="entries")
    last_positions: tuple[int, ...] | None = option(None, help="in place of the aligner's")
    num_tokens: int = option(8000, help="labels, the same of all", at_least=200)


@torch.no_grad()
def of_beginnings(model, positions: torch.Tensor, ids: torch.Tensor) -> float:
    """Perplexity of rows of a full cache's tokens at these positions, relative to their own."""
    rows = ids[0, : ids.shape[1] // len(positions) * len(positions)].view(-1, len(positions))
    losses = [
        model(rows, labels=rows, position_ids=at[None].expand_as(rows)).loss
        for at in (positions, torch.arange(len(positions)))
    ]
    return math.exp(losses[0] - losses[1])


def run(settings: LastPositionsSettings) -> None:
    """Print a line for each cache size and position and one of JSON, the document."""
    started, rows = time.perf_counter(), []
    aligner = Aligner.from_pretrained(settings.aligner)
    config, loaded = aligner.config, load_model(aligner.config.base_model)
    num_ids = settings.num_tokens + max(settings.cache_sizes) + 1
    ids = torch.tensor([first_ids(settings.corpus, loaded.tokenizer, num_ids, "--num-tokens")])
    for size in settings.cache_sizes:
        first = make_method("discard-half", loaded.model, cache_size=size, num_sinks=0, warn=False)
        half = score(first, ids)[-settings.num_tokens :]
        for last in (None, *(settings.last_positions or [config.last_position])):
            aligner.config = config.model_copy(update={"last_position": last})
            sizes = dict(cache_size=size, num_sinks=0, warn=False)
            method = make_method("kvalign", loaded.model, aligner=aligner, **sizes)
            losses = score(method, ids)[-settings.num_tokens :]
            low, high = interval(losses - half)
            ratio = math.exp((losses - half).double().mean())
            row = {"cache_size": size, "last_position": last, "num_labels": len(losses)}
            row |= {"ratio": ratio, "ratio_low": low, "ratio_high": high}
            row |= {"perplexity": math.exp(losses.double().mean()), "beginnings": 1.0}
            if (at := aligner.squeezed(size)[1]) is not None:
                row["beginnings"] = of_beginnings(loaded.model, at[:size], ids)
            rows.append(row)
            print(
                f"C = {size}, last {last}: {ratio:.3f} ({low:.3f} to {high:.3f}), before the first "
                f"eviction {row['beginnings']:.3f}",
                flush=True,
            )
    print(json.dumps(document("script last-positions", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(parse(LastPositionsSettings, sys.argv[1:], "python tests/scripts/last_positions.py")[0])
