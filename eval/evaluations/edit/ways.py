"""Ways to go on after an edit, and what each is worth."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from kvalign.cache.edits import EncodedPart
from kvalign.data_gen.corpora import first_ids
from kvalign.data_gen.facts import ANSWER, NUM_VALUES, QUESTION, FactStreams, are_words_of
from kvalign.eval.evaluations.edit import ANEW, EDITED, FORGOTTEN, PIECE, UNEDITED, EditSettings
from kvalign.eval.evaluations.latency.timing import clocked
from kvalign.eval.protocol import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.eval.protocol.statistics import mean_interval, share_of
from kvalign.methods.base import Method
from kvalign.methods.cached import Cached
from kvalign.models.input_ids import prefix_ids
from kvalign.models.loading import LoadedModel
from kvalign.streaming.pieces import encoded_alone
from kvalign.streaming.scoring import check_losses

TOGETHER = 25  # edits of a batch
NUM_TIMED = 5  # edits of one stream on the clock


class Text(NamedTuple):
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

    @classmethod
    def of(cls, kind: str, text: Text, alone: EncodedPart | None = None) -> "Edit":
        """The last token of `after` is not fed yet: it asks for what follows."""
        start, after = text.before.shape[1], text.after[:, :-1]
        none = text.middle[:, :0]
        old = {"cut": text.middle, "replace": text.other}.get(kind, none)
        new = none if kind == "cut" else text.middle
        ids = torch.cat([text.before, old, after], 1)
        return cls(ids, start, start + old.shape[1], new, alone)

    @property
    def old(self) -> Tensor:
        """Tokens that the edit takes out, [B, n] int64."""
        return self.ids[:, self.start : self.stop]

    @property
    def edited(self) -> Tensor:
        """Tokens of the streams after the edit, [B, N'] int64."""
        return torch.cat([self.ids[:, : self.start], self.new, self.ids[:, self.stop :]], 1)

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
            method.feed(edit.edited)
            return edit.edited.shape[1]
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


def ways_of(settings: EditSettings) -> list[Way]:
    again = [Way(EDITED, num) for num in dict.fromkeys(settings.exactly)]
    return [Way(ANEW), *again, Way(UNEDITED), Way(FORGOTTEN)]


@dataclass(frozen=True)
class Texts:
    """Texts of the settings: `ids` [N, T] int64; facts, or a corpus."""

    ids: Tensor
    are_facts: bool
    prefix: list[int]  # tokens with which each begins

    def edit(self, kind: str, text: Text, model: PreTrainedModel) -> Edit:
        """An edit of this kind; a piece has been encoded as a text of its own."""
        if kind != PIECE:
            return Edit.of(kind, text)
        prefix = torch.tensor(self.prefix, dtype=torch.int64).to(text.middle)
        ids = torch.cat([prefix.expand(len(text.middle), -1), text.middle], 1)
        return Edit.of(kind, text, encoded_alone(model, ids, len(prefix)))

    def batches(self, settings: EditSettings, length: int) -> Iterator[Text]:
        nums = [settings.num_before, length, settings.num_after, settings.num_future, length]
        for ids in self.ids.split(TOGETHER):
            yield Text(*ids[:, : sum(nums)].split(nums, 1))


def texts_of(settings: EditSettings, loaded: LoadedModel) -> Texts:
    """The texts of all edits, each of another place of the corpus."""
    length = settings.num_before + settings.num_after + settings.num_future
    length += 2 * max(settings.lengths)
    prefix: list[int] = []
    if are_facts := are_words_of(loaded.tokenizer):
        ids = torch.from_numpy(FactStreams(settings.seed, settings.num_edits).take(length))
    else:
        prefix = prefix_ids(loaded.tokenizer)
        smaller = "--num-edits, --lengths, --num-before, --num-after or --num-future"
        num = settings.num_edits * (length - len(prefix))
        of_corpus = first_ids(settings.corpus, loaded.tokenizer, num, smaller)
        ids = torch.tensor(of_corpus).view(settings.num_edits, -1)
        ids = torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(len(ids), -1), ids], 1)
    return Texts(ids.to(loaded.model.device), are_facts, prefix)


@torch.no_grad()
def score_method(
    method: Method, settings: EditSettings, texts: Texts, on_streams: Callable[[int], object]
) -> list[Row]:
    rows = []
    for kind in dict.fromkeys(settings.kinds):
        for length in dict.fromkeys(settings.lengths):
            of_ways: dict[str, list[Any]] = {str(way): [] for way in ways_of(settings)}
            encoded, seconds = {}, dict.fromkeys(of_ways, 0.0)
            for text in texts.batches(settings, length):
                edit = texts.edit(kind, text, method.model)
                for way in ways_of(settings):
                    began = time.perf_counter()
                    way.prepare(method, edit)
                    encoded[str(way)] = way(method, edit)
                    answers = _of_facts if texts.are_facts else _of_text
                    of_ways[str(way)].append(answers(method, text, edit))
                    seconds[str(way)] += time.perf_counter() - began
                    on_streams(len(edit.ids))
            figures = (_facts if texts.are_facts else _figures)(of_ways)
            times = _times(
                method,
                texts.edit(kind, next(texts.batches(settings, length)), method.model),
                settings,
            )
            rows += [
                sizes_of(method)
                | {"kind": kind, "length": length, "way": way}
                | figures[way]
                | {"encoded": encoded[way], "edit_ms": times[way]}
                | {"num_edits": settings.num_edits, "seconds": seconds[way]}
                for way in of_ways
            ]
    return rows


def _of_text(method: Method, text: Text, edit: Edit) -> tuple[Tensor, Tensor]:
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


def _figures(of_ways: dict[str, list[tuple[Tensor, Tensor]]]) -> dict[str, Row]:
    """Figures of each way, relative to `ANEW`."""
    both = {way: [torch.cat(x) for x in zip(*of, strict=True)] for way, of in of_ways.items()}
    anew, best_anew = both[ANEW]
    rows = {}
    for way, (losses, best) in both.items():
        apart = (losses - anew).double().mean(1).cpu()
        low, high = mean_interval(apart) if len(apart) > 1 else (apart.mean(), apart.mean())
        rows[way] = {
            "perplexity": losses.double().mean().exp().item(),
            "ratio": apart.mean().exp().item(),
            "ratio_low": float(torch.as_tensor(low).exp()),
            "ratio_high": float(torch.as_tensor(high).exp()),
            "agreement": (best == best_anew).double().mean().item(),
        }
    return rows


def _of_facts(method: Method, text: Text, edit: Edit) -> dict[str, list[bool]]:
    """Return whether facts behind the edit are answered (kept), those of them whose key the new
    tokens tell, too (contested), facts put in (read), and those cut with their old value (told).
    """
    method.feed(text.after[:, -1:])
    answers: dict[str, list[bool]] = {name: [] for name in ("kept", "contested", "read", "told")}
    for name, part in (("kept", text.after), ("read", edit.new), ("told", edit.old)):
        behind = text.after[:, :0] if name == "kept" else text.after
        facts = [_fact(*x) for x in zip(part.tolist(), behind.tolist(), strict=True)]
        questions = torch.tensor([[QUESTION + (key or 0)] for key, _ in facts])
        best = copy.deepcopy(method).feed(questions.to(text.after.device)).argmax(-1).tolist()
        rows = zip(facts, best, text.before.tolist(), edit.new.tolist(), strict=True)
        for (key, value), answer, before, new in rows:
            # A fact that stands before the edit with the same value is not cut.
            if key is None or (name == "told" and _last([*before, *new], key) == value):
                continue
            answers[name].append(answer == ANSWER + value)
            if name == "kept" and _last(new, key) is not None:
                answers["contested"].append(answer == ANSWER + value)
    return answers


def _fact(part: list[int], behind: list[int]) -> tuple[int | None, int]:
    """The oldest fact of a part whose key neither it nor what follows tells or asks again."""
    for i, token in enumerate(part):
        key, value = divmod(token, NUM_VALUES)
        later = [*part[i + 1 :], *behind]
        is_last = all(x // NUM_VALUES != key for x in later if x < QUESTION)
        if token < QUESTION and is_last and QUESTION + key not in later:
            return key, value
    return None, 0


def _last(ids: list[int], key: int) -> int | None:
    values = [x % NUM_VALUES for x in ids if x < QUESTION and x // NUM_VALUES == key]
    return values[-1] if values else None


def _facts(of_ways: dict[str, list[dict[str, list[bool]]]]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for way, of in of_ways.items():
        rows[way] = {}
        for name in of[0]:
            if right := [*chain.from_iterable(x[name] for x in of)]:
                rows[way] |= share_of(name, right)
    return rows


def _times(method: Method, edit: Edit, settings: EditSettings) -> dict[str, float]:
    """Milliseconds of the edit of one stream in each way, the median of edits in turns."""
    times: dict[str, list[float]] = {str(way): [] for way in ways_of(settings)}
    for i in range(NUM_TIMED + 1):
        one = edit.row(i % len(edit.ids))
        for way in ways_of(settings):
            way.prepare(method, one)
            seconds = clocked(method.model.device, way, method, one)
            if i:  # the first warms up
                times[str(way)].append(1e3 * seconds)
    return {way: statistics.median(of) for way, of in times.items()}
