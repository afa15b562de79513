"""Ways to go on after an edit, and what each is worth."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvalign.cache.edits import EncodedPart
from kvalign.eval.evaluations.latency.timing import clocked
from kvalign.eval.protocol.data import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.foundation.statistics import mean_interval
from kvalign.methods.base import Method
from kvalign.methods.cached import Cached
from kvalign.models.input_ids import prefix_ids
from kvalign.models.loading import LoadedModel
from kvalign.streaming.pieces import encoded_alone
from kvalign.streaming.scoring import check_losses

ANEW, EDITED, UNEDITED, FORGOTTEN = "encoded anew", "edited", "unedited", "forgotten"
TOGETHER = 25  # edits of a batch
NUM_TIMED = 5  # edits of one stream on the clock


class EditedText(NamedTuple):
    """Parts of texts side by side, [B, ...] int64 each; `other` is replaced by the middle."""

    before: Tensor
    middle: Tensor
    after: Tensor
    future: Tensor
    other: Tensor


@dataclass(frozen=True)
class Edit:
    """An edit of streams side by side: tokens from `start` to `stop` become `new`.

    Attributes:
        ids: [B, N] int64, tokens that have been fed.
        new: [B, n] int64.
        alone: entries of the new ones, if they have been encoded alone.
    """

    ids: Tensor
    start: int
    stop: int
    new: Tensor
    alone: EncodedPart | None = None

    def row(self, row: int) -> "Edit":
        some = slice(row, row + 1)
        alone = self.alone and self.alone.rows(some)
        return Edit(self.ids[some], self.start, self.stop, self.new[some], alone)


@dataclass(frozen=True)
class Way:
    """Way to go on; `exactly` are tokens behind an edit that are encoded again."""

    name: str
    exactly: int = 0

    def __str__(self) -> str:
        return f"{self.name}, {self.exactly} encoded again" if self.exactly else self.name

    def prepare(self, method: Method, edit: Edit) -> None:
        method.reset()
        if self.name != ANEW:
            method.feed(edit.ids)

    def __call__(self, method: Method, edit: Edit) -> int:
        """Edit the stream; the number of tokens that this encodes."""
        if self.name == UNEDITED:
            return 0
        if self.name == ANEW:
            ids = [edit.ids[:, : edit.start], edit.new, edit.ids[:, edit.stop :]]
            method.feed(torch.cat(ids, 1))
            return sum(map(_num, ids))
        num = edit.ids.shape[1]
        stop = num if self.name == FORGOTTEN else min(num, edit.stop + self.exactly)
        again = edit.ids[:, edit.stop : stop] if self.name == EDITED else edit.ids[:, :0]
        if edit.alone is None:
            ids, alone = [torch.cat([edit.new, again], 1)], []
        else:
            num = min(self.exactly, edit.alone.num)
            ids, alone = [edit.new[:, :num], again], [replace(edit.alone, first=num)]
        parts: list[Tensor | EncodedPart] = [*ids[:1], *alone, *ids[1:]]
        method.edit(edit.start, stop, *(x for x in parts if _num(x)))
        return sum(map(_num, ids))


def _num(new: Tensor | EncodedPart) -> int:
    return new.num if isinstance(new, EncodedPart) else new.shape[1]


def ways_of(exactly: Sequence[int]) -> list[Way]:
    again = [Way(EDITED, num) for num in dict.fromkeys(exactly)]
    return [Way(ANEW), *again, Way(UNEDITED), Way(FORGOTTEN)]


def batches(ids: Tensor, nums: tuple[int, int, int, int]) -> list[EditedText]:
    """Parts of texts [N, T]: so many tokens before an edit, of it, behind it, and of the future."""
    sizes = [*nums, nums[1]]
    return [EditedText(*some[:, : sum(sizes)].split(sizes, 1)) for some in ids.split(TOGETHER)]


def edit_of(kind: str, text: EditedText, loaded: LoadedModel) -> Edit:
    """An edit of this kind; a piece has been encoded as a text of its own. The last token of
    `after` is not fed yet: it asks for what follows.
    """
    start, none, alone = text.before.shape[1], text.middle[:, :0], None
    old = {"cut": text.middle, "replace": text.other}.get(kind, none)
    new = none if kind == "cut" else text.middle
    if kind == "piece":
        prefix = torch.tensor(prefix_ids(loaded.tokenizer), dtype=torch.int64).to(new)
        alone = encoded_alone(
            loaded.model, torch.cat([prefix.expand(len(new), -1), new], 1), len(prefix)
        )
    ids = torch.cat([text.before, old, text.after[:, :-1]], 1)
    return Edit(ids, start, start + old.shape[1], new, alone)


@torch.no_grad()
def score_edits(
    method: Method,
    loaded: LoadedModel,
    kind: str,
    texts: Sequence[EditedText],
    ways: Sequence[Way],
    on_streams: Callable[[int], object],
) -> list[Row]:
    """Row of each way to go on after edits of a kind."""
    results: dict[Way, list[tuple[Tensor, Tensor]]] = {way: [] for way in ways}
    encoded, seconds = dict[Way, int](), dict.fromkeys(ways, 0.0)
    for text in texts:
        edit = edit_of(kind, text, loaded)
        for way, parts in results.items():
            began = time.perf_counter()
            way.prepare(method, edit)
            encoded[way] = way(method, edit)
            parts.append(_continued(method, text))
            seconds[way] += time.perf_counter() - began
            on_streams(len(edit.ids))
    times = _times(method, edit_of(kind, texts[0], loaded), ways)
    num_edits, length = sum(len(text.middle) for text in texts), texts[0].middle.shape[1]
    return [
        sizes_of(method)
        | {"kind": kind, "length": length, "way": str(way)}
        | _figures(parts, results[Way(ANEW)])
        | {"encoded": encoded[way], "edit_ms": times[way]}
        | {"num_edits": num_edits, "seconds": seconds[way]}
        for way, parts in results.items()
    ]


def _continued(method: Method, text: EditedText) -> tuple[Tensor, Tensor]:
    """Losses and most likely tokens of the future, [B, F] each. Nothing is evicted, so it is read
    in one pass.
    """
    ids = torch.cat([text.after[:, -1:], text.future[:, :-1]], 1)
    assert isinstance(method, Cached)
    if method.is_exact:
        logits = method.feed_segment(ids).float()
    else:
        with method.in_eval_mode(), method.cache.forward_pass(*ids.shape):
            logits = method.model(ids, past_key_values=method.cache, use_cache=True).logits.float()
    losses = cross_entropy(logits.mT, text.future, reduction="none")
    check_losses(losses.flatten(), method)
    return losses, logits.argmax(-1)


def _figures(results: list[tuple[Tensor, Tensor]], anew: list[tuple[Tensor, Tensor]]) -> Row:
    """Figures of a way, and relative to the text encoded anew, from what `_continued` gives."""
    losses, best = map(torch.cat, zip(*results, strict=True))
    losses_anew, best_anew = map(torch.cat, zip(*anew, strict=True))
    excess = (losses - losses_anew).double().mean(1).cpu()
    low, high = mean_interval(excess) if len(excess) > 1 else [excess.mean().item()] * 2
    return {
        "perplexity": losses.double().mean().exp().item(),
        "ratio": excess.mean().exp().item(),
        "ratio_low": math.exp(low),
        "ratio_high": math.exp(high),
        "agreement": (best == best_anew).double().mean().item(),
    }


def _times(method: Method, edit: Edit, ways: Sequence[Way]) -> dict[Way, float]:
    """Milliseconds of the edit of one stream in each way, the median of edits in turns."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for i in range(NUM_TIMED + 1):
        one = edit.row(i % len(edit.ids))
        for way, of_way in times.items():
            way.prepare(method, one)
            of_way.append(1e3 * clocked(method.model.device, way, method, one))
    return {way: statistics.median(of_way[1:]) for way, of_way in times.items()}  # one warms up
