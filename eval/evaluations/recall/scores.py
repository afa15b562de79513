"""Stream of `kvalign eval recall`, and the number of right answers."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvalign.data_gen import facts
from kvalign.data_gen.facts import FactStreams
from kvalign.eval.evaluations.recall import BEYOND, FAR, QUARTERS, RecallSettings
from kvalign.eval.protocol import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.eval.protocol.statistics import share_of
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.loading import LoadedModel
from kvalign.streaming.scoring import OnLabels, check_losses, hits, score

PIECE_LEN = 4096  # tokens


@dataclass(frozen=True)
class Stream:
    """Streams side by side for one cache size."""

    ids: Tensor  # [B, N] int64, on the model's device
    ages: Tensor  # [B, N - C - 1] int64, of each label that counts the distance of its fact; else 0


def check_words(loaded: LoadedModel) -> None:
    """Raise UserError for a model with other tokens than the stream's."""
    if not facts.are_words_of(loaded.tokenizer):
        raise UserError(
            f"{loaded.spec.name} was not trained on facts and questions: use recall-gpt2 or "
            "recall-llama, or train one with kvalign pretrain --corpus recall"
        )


def parts_of(farthest: int) -> tuple[str, ...]:
    """Ranges of distance for counting questions, in order."""
    far = [name for times, name in FAR.items() if times <= farthest]
    return (*QUARTERS, *(far or [BEYOND]))


def part_of(age: int, cache_size: int, farthest: int = 0) -> int:
    """Number of the range of a fact's distance."""
    quarter = (4 * age - 1) // cache_size
    if quarter < len(QUARTERS):
        return quarter
    times = -(-age // cache_size)  # above C: 2, up to 2 C; 3 and 4, up to 4 C; ...
    return len(QUARTERS) + ((times - 1).bit_length() - 1 if farthest else 0)


def read_stream(cache_size: int, settings: RecallSettings, device: torch.device) -> Stream:
    """Stream long enough for `num_questions` in each range; more are not counted."""
    first, farthest = cache_size + 1, settings.farthest
    max_age = cache_size * farthest or math.ceil(1.5 * cache_size)
    num_rows = settings.num_streams
    streams = FactStreams(settings.seed, num_rows, max_age, resting=bool(farthest))
    ids, num_parts = np.empty((num_rows, 0), np.int64), len(parts_of(farthest))
    while True:
        piece_len = max(-(-PIECE_LEN // num_rows), ids.shape[1] // 4)
        ids = np.concatenate([ids, streams.take(piece_len)], axis=1)
        ages = np.array([facts.ages(row) for row in ids.tolist()])[:, first:]
        ages[ages > max_age] = 0
        counts = np.zeros(num_parts, np.int64)
        for at in zip(*ages.T.nonzero()[::-1], strict=True):  # in the order of time
            part = part_of(int(ages[at]), cache_size, farthest)
            counts[part] += 1
            if counts[part] > settings.num_questions:
                ages[at] = 0
        if counts.min() >= settings.num_questions:
            break
    end = int(ages.nonzero()[1].max()) + 1
    ids, ages = ids[:, : first + end], ages[:, :end]
    return Stream(torch.from_numpy(ids).to(device), torch.from_numpy(ages))


def score_method(method: Method, stream: Stream, on_labels: OnLabels, farthest: int = 0) -> Row:
    start = time.perf_counter()
    of_labels = stream.ages.flatten()
    is_answer = of_labels > 0
    mask = is_answer.to(stream.ids.device)
    right = score(method, stream.ids, on_labels, hits, mask).cpu()[is_answer]
    seconds = time.perf_counter() - start
    check_losses(right, method)
    cache_size = method.sizes.cache_size
    ages = of_labels[is_answer]
    parts = torch.tensor([part_of(age, cache_size, farthest) for age in ages.tolist()])
    row = {**sizes_of(method), "num_questions": len(right)}
    hits_of = {"accuracy": right[parts < len(QUARTERS)]}
    hits_of |= {name: right[parts == i] for i, name in enumerate(parts_of(farthest))}
    hits_of[BEYOND] = right[(ages > cache_size) & (ages <= math.ceil(1.5 * cache_size))]
    for name, of_part in hits_of.items():
        row |= share_of(name, of_part.tolist())
    return row | {"seconds": seconds}
