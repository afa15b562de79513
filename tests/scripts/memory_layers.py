"""Which layers of a model need a memory: `--recall-layers`, chosen by what the loss of a text says.

    python tests/scripts/memory_layers.py --model gpt2-mini --corpus text:valid.txt

Each layer in turn goes without. What is left of the gain of all layers' memory says what it is for.
Sets of layers that are asked for are judged the same way. It takes a run of the text for each.
"""

import json
import sys
from dataclasses import dataclass

import torch

import kvalign
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.corpora import token_pieces
from kvalign.foundation.settings import Settings, option
from kvalign.methods import make_method
from kvalign.streaming.scoring import score


@dataclass(frozen=True, kw_only=True)
class MemoryLayersSettings(Settings):
    """Measure what each layer's memory gains."""

    model: str = option("gpt2-mini", help="as everywhere")
    method: str = option("kvalign", help="a method that takes a memory")
    corpus: str = option(help="text that is judged on")
    cache_size: int = option(64, help="entries, sinks included", at_least=8)
    num_tokens: int = option(8192, help="tokens of the text", at_least=64)
    memory: int = option(100_000, help="evicted tokens that are kept aside")
    sets: str | None = option(
        None, help='sets of layers, as "7,15-29 10-29" (default: all but one, each)'
    )


def run(settings: MemoryLayersSettings) -> int:
    """Print a line of JSON for each set: its layers, the mean loss, and the share of what the
    memory of all layers gains.
    """
    loaded, size = kvalign.load_model(settings.model, dtype="float32"), settings.cache_size
    ids: list[int] = []
    for piece in token_pieces(settings.corpus, loaded.tokenizer):
        ids += piece
        if len(ids) > settings.num_tokens:
            break
    text = torch.tensor([ids[: settings.num_tokens]])

    def loss(**changes) -> float:
        method = make_method(settings.method, loaded.model, cache_size=size, warn=False, **changes)
        return score(method, text).mean().item()

    none, most = loss(), loss(memory=settings.memory)
    print(json.dumps({"no memory": none, "all layers": most}), flush=True)
    layers = range(loaded.spec.num_layers)
    sets = [",".join(str(j) for j in layers if j != i) for i in layers]
    for i, one in enumerate(settings.sets.split() if settings.sets else sets):
        found = loss(memory=settings.memory, recall_layers=one)
        about = {"layers": one} if settings.sets else {"without": i}
        share = (none - found) / (none - most)
        print(json.dumps(about | {"loss": found, "share": share}), flush=True)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = "python tests/scripts/memory_layers.py"
    sys.exit(run(parse(MemoryLayersSettings, sys.argv[1:], words)[0]))
