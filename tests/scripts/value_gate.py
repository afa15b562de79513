"""A gate of the network's values: perplexity of a stream with their correction times 0 to 1.

    python tests/scripts/value_gate.py --corpus text:test.txt

Gate 0 corrects keys alone, 1 is the network as it is. So the best row is the most that a learned
gate can reach, if it is one number.
"""

import json
import math
import sys
import time
from dataclasses import dataclass

import torch

from kvalign import load_model, make_method
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.protocol.document import document
from kvalign.eval.protocol.statistics import interval
from kvalign.foundation.settings import Settings, option
from kvalign.methods.cached import Cached
from kvalign.streaming.scoring import score


@dataclass(frozen=True, kw_only=True)
class ValueGateSettings(Settings):
    """Stream a text with a network whose values are corrected in part."""

    model: str = option("gpt2-mini", help="shipped name, hub id or folder of a causal LM")
    aligner: str = option("kvalign-gpt2-mini-network", help="a network, name or folder")
    corpus: str = option(help="text that is streamed")
    cache_sizes: tuple[int, ...] = option((64, 128), help="entries, comma-separated")
    gates: tuple[float, ...] = option((0.0, 0.25, 0.5, 1.0), help="factors, the first 0")
    num_tokens: int = option(4000, help="labels", at_least=200)


@torch.no_grad()
def run(settings: ValueGateSettings) -> None:
    """Print a line for each cache size and gate and one of JSON, the document."""
    started = time.perf_counter()
    loaded, rows = load_model(settings.model, dtype="float32"), []
    for size in settings.cache_sizes:
        ids = first_ids(
            settings.corpus, loaded.tokenizer, settings.num_tokens + size + 1, "--num-tokens"
        )
        method = make_method(
            "kvalign", loaded.model, cache_size=size, aligner=settings.aligner, warn=False
        )
        assert isinstance(method, Cached) and method.aligner is not None
        last = method.aligner.value.fc3
        weight, bias = last.weight.clone(), last.bias.clone()
        losses = []
        for gate in settings.gates:
            last.weight.copy_(gate * weight)
            last.bias.copy_(gate * bias)
            losses.append(score(method, torch.tensor([ids])))
            low, high = interval(losses[-1] - losses[0])
            ratio = math.exp((losses[-1] - losses[0]).double().mean())
            row = {"cache_size": size, "gate": gate, "num_labels": len(losses[-1])}
            row |= {"perplexity": math.exp(losses[-1].double().mean()), "ratio": ratio}
            rows.append(row | {"ratio_low": low, "ratio_high": high})
            print(
                f"C = {size}, gate {gate}: perplexity {rows[-1]['perplexity']:.2f}, "
                f"{rows[-1]['ratio']:.3f} times gate 0 ({low:.3f} to {high:.3f})",
                flush=True,
            )
    print(json.dumps(document("script value-gate", settings, rows, started=started)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(parse(ValueGateSettings, sys.argv[1:], "python tests/scripts/value_gate.py")[0])
