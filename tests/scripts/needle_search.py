"""Needles far back: whether the search misses them, or the model does not read what is found.

    python tests/scripts/needle_search.py --corpus text:test.txt

Streams are read as `kvalign eval needle` reads them, with the search of our kernel. Each question
is then asked on copies of the stream that differ in one thing: `exact` scores all entries exactly,
`64` and `128` take back so many, in place of 32, `all layers` ask where the plan's alone do.
"""

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from unittest.mock import patch

import torch

from kvalign.app.cli.arguments import parse
from kvalign.eval.evaluations.needle import NeedleSettings, asker, haystacks
from kvalign.eval.protocol.data import Row
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option
from kvalign.foundation.statistics import share_of
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.models import kernel
from kvalign.models.loading import LoadedModel, load_model

SEARCHES = {"ours": {}, "exact": {}, "64": {"num_recalled": 64}, "128": {"num_recalled": 128}}
SEARCHES["all layers"] = {"recall_layers": "all"}


@dataclass(frozen=True, kw_only=True)
class NeedleSearchSettings(Settings):
    """Ask the same streams of needles with several searches.

    Example:
        python tests/scripts/needle_search.py --corpus text:test.txt --num-streams 2
    """

    corpus: str = option(help="the text around the codes")
    model: str = option("smollm2-135m-instruct", help="model that answers")
    recall_layers: str = option("3-8,15-29", help="layers that take entries back")
    cache_size: int = option(256, help="entries of the cache", at_least=32)
    distances: tuple[int, ...] = option(
        (31, 63), help="from a code to its question, in cache sizes"
    )
    num_streams: int = option(19, help="streams, each with its own text", at_least=1)


def measure(settings: NeedleSearchSettings) -> list[Row]:
    loaded = load_model(settings.model, dtype="float32")
    of_streams = NeedleSettings(
        corpus=settings.corpus,
        cache_sizes=(settings.cache_size,),
        distances=settings.distances,
        num_streams=settings.num_streams,
    )
    ask, reader = asker(loaded), method_for(settings, loaded)
    found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    for stream in haystacks(of_streams, loaded)["single"]:
        reader.reset()
        num_read, (needle,) = 0, stream.needles
        for distance in sorted(settings.distances):
            end = needle.end + distance * settings.cache_size
            reader.feed(torch.tensor([stream.ids[num_read:end]]))
            num_read, state = end, reader.state()
            for search, sizes in SEARCHES.items():
                with patch.object(kernel, "is_here", kernel.is_here if search != "exact" else bool):
                    method = method_for(settings, loaded, **sizes)
                    method.restore(state)
                    found[search, distance].append([ask(method, needle)["accuracy"]])
            print(distance, {x: y[-1] for (x, d), y in found.items() if d == distance}, flush=True)
    return [
        {"search": search, "distance": distance, **share_of("accuracy", groups)}
        for (search, distance), groups in found.items()
    ]


def method_for(settings: NeedleSearchSettings, loaded: LoadedModel, **sizes: str | int) -> Method:
    of_cache = {"recall_layers": settings.recall_layers, "memory": 100_000, "num_sinks": 4} | sizes
    return make_method(
        "streaming-llm", loaded.model, cache_size=settings.cache_size, warn=False, **of_cache
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    settings = parse(NeedleSearchSettings, sys.argv[1:], "python tests/scripts/needle_search.py")[0]
    print(
        json.dumps(document("script needle-search", settings, measure(settings), started=started))
    )
