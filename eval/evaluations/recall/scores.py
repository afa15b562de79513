"""The stream of `kvalign eval recall`, and how many of its answers are right."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvalign.data_gen.facts import WORDS, FactStreams, ages
from kvalign.eval.evaluations.recall import BEYOND, QUARTERS, RecallSettings
from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.eval.protocol.verdicts import share_interval
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.loading import LoadedModel
from kvalign.streaming.health import check_losses
from kvalign.streaming.scoring import OnLabels, hits, score

PIECE_LEN = 4096  # tokens


@dataclass(frozen=True)
class Stream:
    """Streams side by side for one cache size."""

    ids: Tensor  # [B, N] int64, on the model's device
    ages: Tensor  # [B, N - C - 1] int64, of each label that counts the distance of its fact; else 0


def check_words(loaded: LoadedModel) -> None:
    """Raise UserError for a model that has other tokens than the stream."""
    if loaded.tokenizer.convert_tokens_to_ids(list(WORDS)) != [*range(len(WORDS))]:
        raise UserError(
            f"{loaded.spec.name} was not trained on facts and questions: take recall-gpt2 or "
            "recall-llama, or make one with kvalign pretrain --corpus recall"
        )


def part_of(age: int, cache_size: int) -> int:
    """0 to 3: the quarter of the cache in which a fact of that distance lies; 4: beyond it."""
    return min((4 * age - 1) // cache_size, len(QUARTERS))


def read_stream(cache_size: int, settings: RecallSettings, device: torch.device) -> Stream:
    """A stream long enough for `num_questions` in each part; more than that are not counted."""
    first, max_age = cache_size + 1, math.ceil(1.5 * cache_size)
    num_rows = settings.num_streams
    streams = FactStreams(settings.seed, num_rows, max_age=max_age)
    ids, wanted = np.empty((num_rows, 0), np.int64), len(QUARTERS) + 1
    while True:
        ids = np.concatenate([ids, streams.take(-(-PIECE_LEN // num_rows))], axis=1)
        found = np.array([ages(row) for row in ids.tolist()])[:, first:]
        found[found > max_age] = 0
        counts = np.zeros(wanted, np.int64)
        for at in zip(*found.T.nonzero()[::-1], strict=True):  # in the order of time
            part = part_of(found[at], cache_size)
            counts[part] += 1
            if counts[part] > settings.num_questions:
                found[at] = 0
        if counts.min() >= settings.num_questions:
            break
    end = int(found.nonzero()[1].max()) + 1
    ids, found = ids[:, : first + end], found[:, :end]
    return Stream(torch.from_numpy(ids).to(device), torch.from_numpy(found))


def score_method(method: Method, stream: Stream, on_labels: OnLabels) -> Row:
    start = time.perf_counter()
    of_labels = stream.ages.flatten()
    wanted = of_labels > 0
    right = score(method, stream.ids, on_labels, hits, wanted.to(stream.ids.device)).cpu()[wanted]
    seconds = time.perf_counter() - start
    check_losses(right, method)
    cache_size = method.sizes.cache_size
    parts = torch.tensor([part_of(age, cache_size) for age in of_labels[wanted].tolist()])
    row = {**sizes_of(method), "num_questions": len(right)}
    found = {"accuracy": right[parts < len(QUARTERS)]}
    found |= {name: right[parts == i] for i, name in enumerate((*QUARTERS, BEYOND))}
    for name, of_part in found.items():
        share = of_part.double().mean().item()
        interval = share_interval(share, len(of_part))
        assert interval
        row |= {name: share, f"{name}_low": interval[0], f"{name}_high": interval[1]}
    return row | {"seconds": seconds}
