"""Endurance of the cache: a long periodic stream through tiny random models.

    python tests/scripts/endurance.py --num-tokens 1000000

A sound cache has no memory of how long a stream is: the process does not grow, positions stay below
the context length, a token costs what it cost, and text of a fixed period is predicted as well at
the end as at the beginning.

    tenth      |          1 |    2        | 3 ... 9    |   10        |
    fed as     | PPPPPPPPPs | PPPPPPPssss | PPPPPPPPPs | PPPPPPPssss |
    measured   |            |         ^^^ |            |         ^^^ |

P is a period at once, longer than the cache; s is a period in single steps. The last quarter of two
tenths is measured, after a period of single steps, which is longer than the cache: nothing is left
in it of how the tokens before were fed.
"""

import gc
import itertools
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone
from helpers.methods import tables
from helpers.tiny_models import CONTEXT_LEN, tiny_model

from kvalign.app.cli.arguments import parse
from kvalign.foundation.settings import Settings, option
from kvalign.methods import make_method

KINDS, DTYPES = ("gpt2", "llama", "bloom"), ("float32", "bfloat16")
METHODS = ("streaming-llm", "kvalign")
MEASURED = (2, 10)  # tenths
CACHE_SIZE, NUM_SINKS, PERIOD, VOCAB_SIZE = 32, 4, 56, 64
_SHAPES = {
    "bloom": dict(n_layer=1, n_head=2, hidden_size=16),
    "gpt2": dict(n_layer=1, n_head=2, n_embd=16),
    "llama": dict(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=16,
        intermediate_size=32,
    ),
}
COMBINATIONS = [
    (kind, name, dtype)
    for kind, name, dtype in itertools.product(KINDS, METHODS, DTYPES)
    if (kind, name) != ("bloom", "kvalign")  # nothing to place where positions are in the bias
]
# How far the perplexity of the last tenth may be from the second's: half precision may round
# another way where the memory lies otherwise.
MAX_CHANGE = {"float32": 1e-3, "bfloat16": 1e-2}


@dataclass(frozen=True, kw_only=True)
class EnduranceSettings(Settings):
    """Stream a periodic text through every combination of positions, method and precision.

    Example:
        python tests/scripts/endurance.py --num-tokens 1000000
    """

    num_tokens: int = option(1_000_000, help="tokens of each stream", at_least=20 * PERIOD)
    max_slope: float = option(
        100.0, help="bytes that memory may grow per 1000 tokens (one page is 100 in 40000)", above=0
    )


def run(settings: EnduranceSettings) -> int:
    """Print a line for each combination and one of JSON; 1 if anything is off, else 0."""
    cases = []
    for kind, name, dtype in COMBINATIONS:
        case = endure(kind, name, dtype, settings.num_tokens)
        case["faults"] = faults(case, settings.max_slope)
        cases.append(case)
        print(describe(case), flush=True)
    is_sound = not any(case["faults"] for case in cases)
    print(json.dumps({"settings": settings.as_dict(), "sound": is_sound, "cases": cases}))
    return 0 if is_sound else 1


def endure(kind: str, name: str, dtype: str, num_tokens: int) -> dict:
    """Stream about `num_tokens`, whole periods a tenth; what was measured, by name."""
    model = tiny_model(kind, vocab_size=VOCAB_SIZE, **_SHAPES[kind]).to(getattr(torch, dtype))
    extra = {}
    if name == "kvalign":
        extra["aligner"] = tables(model, scale=0.5 if kind == "gpt2" else 0, num_sinks=NUM_SINKS)
    method = make_method(name, model, cache_size=CACHE_SIZE, num_sinks=NUM_SINKS, **extra)
    rng = torch.Generator().manual_seed(4)
    period = torch.randint(2, VOCAB_SIZE, (1, PERIOD), generator=rng)
    gc.freeze()  # what was there before is not looked at ten times
    stream, num_periods = Stream(method, period), num_tokens // (10 * PERIOD)  # a tenth
    num_measured = max(1, num_periods // 4)
    rss, nll, ms, start = [], {}, {}, time.perf_counter()
    for tenth in range(1, 11):
        num_last = num_measured if tenth in MEASURED else 0
        for _ in range(num_periods - 1 - num_last):
            stream.block()
        stream.steps()
        stream.times_s.clear()
        nll[tenth] = sum(stream.steps() for _ in range(num_last))
        ms[tenth] = 1e3 * float(np.median(stream.times_s or [0]))
        gc.collect()
        rss.append(rss_bytes())
    seconds = time.perf_counter() - start
    num_tokens = 10 * num_periods * PERIOD
    early, late = (float(np.exp(nll[tenth] / (num_measured * PERIOD))) for tenth in MEASURED)
    at = np.arange(1, 11) / 10 * num_tokens
    stored = [x for layer in method.cache.layers for x in (layer.keys, layer.values)]
    return {
        "kind": kind,
        "method": name,
        "dtype": dtype,
        "num_tokens": num_tokens,
        "rss_bytes": [rss[0], rss[4], rss[9]],
        # From 30 % on: before, allocators and the caches of kernels fill, of single steps last.
        "bytes_per_1000_tokens": 1000 * float(np.polyfit(at[2:], rss[2:], 1)[0]),
        "num_nan": stream.num_nan + sum(not torch.isfinite(x).all() for x in stored),
        "max_position": stream.max_position,
        "max_stored": stream.max_stored,
        "ppl_early": early,
        "ppl_late": late,
        "ratio": late / early,
        "step_ms": [ms[tenth] for tenth in MEASURED],
        "tokens_per_s": num_tokens / seconds,
    }


class Stream:
    """An endless repetition of `period` [1, P], fed to a method whose first input it is."""

    def __init__(self, method, period: Tensor):
        self.method, self.period = method, period
        self.ids = [period[:, i : i + 1] for i in range(period.shape[1])]
        self.num_nan = self.max_position = self.max_stored = 0
        self.times_s: deque[float] = deque(maxlen=1000)
        base = method.model.base_model
        embedding = getattr(base, "wpe", None) or getattr(base, "rotary_emb", None)
        if embedding is not None:  # ALiBi has no positions
            embedding.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, args, kwargs) -> None:
        """Note the positions that the model itself works with."""
        positions = kwargs.get("position_ids", args[-1] if args else None)
        self.max_position = max(self.max_position, int(positions.max()))

    def block(self) -> None:
        """Feed a period at once."""
        self._note(self.method.feed(self.period))

    def steps(self) -> float:
        """Feed a period token by token; the sum of the NLL of what follows each, in nats."""
        total = 0.0
        for i, ids in enumerate(self.ids):
            start = time.perf_counter()
            logits = self.method.feed(ids)
            self.times_s.append(time.perf_counter() - start)
            self._note(logits)
            label = self.period[:, (i + 1) % len(self.ids)]
            total += float(torch.nn.functional.cross_entropy(logits, label))
        return total

    def _note(self, logits: Tensor) -> Tensor:
        self.num_nan += not torch.isfinite(logits).all()
        self.max_stored = max(self.max_stored, self.method.cache.num_stored)
        return logits


def faults(case: dict, max_slope: float) -> list[str]:
    """What is off in a combination; nothing if the cache is sound."""
    limits = {
        "bytes_per_1000_tokens": max_slope,
        "num_nan": 0,
        "max_position": CONTEXT_LEN - 1,
        "max_stored": CACHE_SIZE,
    }
    found = [f"{name} above {limit}" for name, limit in limits.items() if not case[name] <= limit]
    change = abs(case["ratio"] - 1)
    if not change <= MAX_CHANGE[case["dtype"]]:
        found.append(f"ratio off by more than {MAX_CHANGE[case['dtype']]}")
    return found


def describe(case: dict) -> str:
    """One line of a combination."""
    rss = " ".join(f"{x / 2**20:.2f}" for x in case["rss_bytes"])
    return (
        f"{case['kind']} {case['method']} {case['dtype']}: {case['num_tokens']} tokens, "
        f"RSS {rss} MiB at 10, 50, 100 %, {case['bytes_per_1000_tokens']:+.1f} bytes/1000 tokens, "
        f"{case['num_nan']} NaN, position <= {case['max_position']}, stored <= "
        f"{case['max_stored']}, ppl {case['ppl_early']:.6f} -> {case['ppl_late']:.6f} (ratio "
        f"{case['ratio']:.8f}), step {case['step_ms'][0]:.3f} -> {case['step_ms'][1]:.3f} ms, "
        f"{case['tokens_per_s']:.0f} tokens/s; " + (", ".join(case["faults"]) or "sound")
    )


def rss_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run(parse(EnduranceSettings, sys.argv[1:], "python tests/scripts/endurance.py")[0]))
