"""Time of an edit of one stream beside encoding its new tokens, on models of well-known shapes.

    python tests/scripts/edit_times.py

Rows: a cut of 50 tokens, and 50 tokens in place of 50 others, with so many tokens behind; and the
same 50 with nothing behind, which is what encoding them costs. Medians of edits in turns, on one
thread, with tables that change nothing but take as long as trained ones.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.methods import tables

from kvalign.eval.evaluations.latency.subjects import random_model
from kvalign.methods import make_method

NUM_BEFORE, NUM_NEW, NUM_EDITS = 64, 50, 9
STREAMS = {  # shape: method, tokens behind
    "smollm2-135m": ("streaming-llm", 1000),
    "distilgpt2": ("streaming-llm", 900),
    "distilgpt2 with a table": ("kvalign", 900),
}


def times(name: str) -> dict[str, float]:
    """Milliseconds of each way, the median."""
    method, num_behind = STREAMS[name]
    model = random_model(name.partition(" ")[0])
    num = NUM_BEFORE + NUM_NEW + num_behind
    aligner = {"aligner": tables(model, chunk_len=1024)} if method == "kvalign" else {}
    most = model.config.max_position_embeddings - 1
    sizes = dict(cache_size=min(num + 8, most), num_sinks=0, warn=False)
    stream = make_method(method, model, **sizes, **aligner)
    ids = torch.randint(5, 1000, (1, num))
    stream.feed(ids)
    first, last = NUM_BEFORE, NUM_BEFORE + NUM_NEW
    ways = {
        "cut": (first, last),
        "replace": (first, last, ids[:, :NUM_NEW]),
        "encode": (first, stream.num_tokens, ids[:, :NUM_NEW]),
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(NUM_EDITS):
        for way, edit in ways.items():
            began = time.perf_counter()
            stream.edit(*edit)
            spent[way].append(1e3 * (time.perf_counter() - began))
            stream.undo_edit()
    return {way: statistics.median(x[1:]) for way, x in spent.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name in STREAMS:
            ms = times(name)
            print(
                f"{name}, {STREAMS[name][1]} behind: cut {ms['cut']:.1f} ms, replace "
                f"{ms['replace']:.1f} ms, encode {ms['encode']:.1f} ms; relative to encoding: cut "
                f"{ms['cut'] / ms['encode']:.3f}, replace {ms['replace'] / ms['encode']:.3f}",
                flush=True,
            )
