"""Recall: facts in an endless stream, and questions for the last value of a key.

    k7=3 k41=0 k12=5 k41? 0 k7=6 k3=1 k7? 6 ...

The stream is that of `kvalign.data_gen.facts`, for the models that were trained on it. An answer is
one token, and right if it is the most likely one. Its distance is that of its fact, in tokens to
the question; beyond C only a memory has it. A question does not count if a later answer has
repeated its value.

All keys get new values equally often, so a fact is at most some 600 tokens old. With `--farthest`
some keys get new values more rarely, and facts become as old as that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalign.eval.protocol import DrawnSettings, Evaluation, seed_option
from kvalign.eval.protocol.data import Column, Document, Drawing, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ITEMS, option

if TYPE_CHECKING:
    from torch import Tensor

    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.scoring import OnLabels

MOST_STREAMS = 2**12  # each is made token by token


@dataclass(frozen=True, kw_only=True)
class RecallSettings(DrawnSettings):
    """Ask for facts of an endless stream: how much of its cache can a method read?

    Example:
        kvalign eval recall --cache-sizes 32 --num-questions 20
    """

    model: str = option(
        "recall-gpt2",
        help="recall-gpt2, recall-llama, or the folder of a model trained in the same way",
    )
    num_questions: int = option(
        2000,
        help="questions for each quarter of the cache, and beyond it",
        at_least=1,
        at_most=MOST_ITEMS,
    )
    farthest: int = option(
        0,
        help="ask for facts up to 2, 4, 8, ... 64 times C back, which needs keys whose values "
        "change rarely (0: up to 1.5 C)",
        at_least=0,
    )
    seed: int = seed_option("the stream, the same for each method", default=1)
    num_streams: int = option(
        1,
        help="streams side by side, each with a part of the questions: faster for methods that "
        "step",
        at_least=1,
        at_most=MOST_STREAMS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (least := min(self.cache_sizes)) < len(QUARTERS):
            raise UserError(
                f"--cache-sizes must be at least {len(QUARTERS)}, because recall is counted by "
                f"quarters of a cache, got {least}"
            )
        if self.farthest not in (0, *FAR):
            raise UserError(
                f"--farthest must be one of 0, {', '.join(map(str, FAR))}, got {self.farthest}"
            )


@measures(RecallSettings)
def recall(settings: RecallSettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Let every method read the same streams at each cache size, and count right answers by
    distance.

    Returns:
        A document whose rows have the sizes, `COLUMNS`, those of `FAR` up to `farthest`, the ends
        of 95 % intervals (NAME_low, NAME_high; of the perplexity low, high), num_questions,
        seconds.

    Raises:
        UserError: a model that was not trained on such streams.
    """
    import torch

    from kvalign.data_gen import facts
    from kvalign.eval.protocol.grid import one_by_one

    if not facts.are_words_of(loaded.tokenizer):
        raise UserError(
            f"{loaded.spec.name} was not trained on facts and questions: use recall-gpt2 or "
            "recall-llama, or train one with kvalign pretrain --corpus recall"
        )
    progress.phase("making the streams")
    sizes = dict.fromkeys(settings.cache_sizes)
    names = ("num_questions", "farthest", "num_streams", "seed")
    numbers: dict[str, int] = {name: getattr(settings, name) for name in names}
    streams = {size: facts.asked_streams(size, **numbers) for size in sizes}
    longest = max(ages.size for _, ages in streams.values())
    for method, bar in one_by_one(methods, longest, "tokens"):
        ids, ages = map(torch.from_numpy, streams[method.sizes.cache_size])
        yield score_method(method, ids, ages, bar.update, settings.farthest)
        bar.skip(longest - ages.numel())


QUARTERS = ("newest", "second", "third", "oldest")
"""Parts of a cache: distances up to C / 4, C / 2, 3 C / 4, C."""
BEYOND = "beyond"  # distances above C, up to 3 C / 2
FAR = {2**i: f"to_{2**i}c" for i in range(1, 7)}
"""With `--farthest` the parts beyond C: distances up to so many times C."""
MIDDLES = dict(zip((*QUARTERS, BEYOND), (1 / 8, 3 / 8, 5 / 8, 7 / 8, 5 / 4), strict=True))
"""Position of a part in plots: its distance relative to C."""


def parts_of(farthest: int) -> tuple[str, ...]:
    """Ranges of distance for counting questions, in order."""
    far = [name for times, name in FAR.items() if times <= farthest]
    return (*QUARTERS, *(far or [BEYOND]))


def score_method(
    method: Method, ids: Tensor, ages: Tensor, on_labels: OnLabels, farthest: int = 0
) -> Row:
    """Row of a method on streams of `facts.asked_streams`: ids [B, N], ages [B, N - C - 1]."""
    import torch

    from kvalign.data_gen.facts import part_of
    from kvalign.eval.protocol.questions import row_of
    from kvalign.foundation.statistics import interval
    from kvalign.streaming.scoring import check_losses, score

    start = time.perf_counter()
    ids, of_labels = ids.to(method.model.device), ages.flatten()
    is_answer = of_labels > 0
    mask = is_answer.to(ids.device)
    signed = score(method, ids, on_labels, signed_losses, mask).cpu()[is_answer]
    seconds = time.perf_counter() - start
    nll, right = signed.abs(), (signed >= 0).float()
    check_losses(nll, method)
    cache_size = method.sizes.cache_size
    ages = of_labels[is_answer]
    parts = torch.tensor([part_of(age, cache_size, farthest) for age in ages.tolist()])
    within = nll[parts < len(QUARTERS)]
    low, high = interval(within)
    more = {"perplexity": within.double().mean().exp().item(), "low": low, "high": high}
    hits_of = {"accuracy": right[parts < len(QUARTERS)]}
    hits_of |= {name: right[parts == i] for i, name in enumerate(parts_of(farthest))}
    hits_of[BEYOND] = right[(ages > cache_size) & (ages <= math.ceil(1.5 * cache_size))]
    # One group: each fact is drawn apart, and asked for once.
    answers = {name: [of_part.tolist()] for name, of_part in hits_of.items()}
    return row_of(method, answers, seconds, {"num_questions": len(right), **more})


def signed_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats of logits [N, V] and labels [N], as [N]; negative where the label is not the most
    likely token, which costs log 2 at least.
    """
    from kvalign.streaming.scoring import hits, losses

    return losses(logits, labels) * (2 * hits(logits, labels) - 1)


COLUMNS = {
    "perplexity": Column(
        "perplexity",
        3,
        "lower",
        "of the answers at distances up to C: 1 is sure and right, 8 is by chance; 95 %, moving "
        "blocks",
        ("low", "high"),
    )
} | {
    name: share_column(
        name,
        title,
        f"right answers at distances {distances}",
        better="" if name == BEYOND else "higher",
    )
    for name, title, distances in (
        ("accuracy", "recall", "up to C"),
        ("newest", "newest quarter", "up to C / 4"),
        ("second", "second", "above that, up to C / 2"),
        ("third", "third", "above that, up to 3 C / 4"),
        ("oldest", "oldest quarter", "above that, up to C"),
        (BEYOND, "beyond C", "above C, up to 3 C / 2; 0.125 by chance"),
        *((x, f"to {n} C", f"above {n // 2} C, up to {n} C") for n, x in FAR.items()),
    )
}


class RecallEvaluation(Evaluation):
    settings = RecallSettings
    run = staticmethod(recall)
    heading = "Recall"
    about = (
        "A stream has facts (key k now has value v) and questions for the last value of a key. "
        "The model was trained to answer them. One answer in eight is right by chance. A cache "
        "of C entries has facts up to C tokens back, less its sinks. Columns are shares of "
        "right answers by the quarter in which the fact lies."
    )
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing:
        """Accuracy against distance, in a panel for each cache size."""
        from kvalign.eval.drawing import draw, panels_by

        is_far = any(name in document["rows"][0] for name in FAR.values())
        middles = {x: y for x, y in MIDDLES.items() if not (is_far and x == BEYOND)}
        middles |= {name: 0.75 * times for times, name in FAR.items()}
        points = [
            row
            | {"distance": middle * row["cache_size"], "right": row[part]}
            | {"low": row[f"{part}_low"], "high": row[f"{part}_high"]}
            for row in document["rows"]
            for part, middle in middles.items()
            if part in row
        ]
        panels = panels_by("cache_size", points, "C = ", "distance", "right", "high", "low")
        figure = draw(panels, x="distance of the fact, tokens", y="right answers", log_x=is_far)
        caption = f"Right answers against the distance of the fact: {self.title(document)}"
        return figure, f"{caption}; bars: 95 %"


EVALUATION = RecallEvaluation()
