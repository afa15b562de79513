"""Long stream in half precision, compared with float32 and with re-encoding."""

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvalign.foundation import progress
from kvalign.invariants.stream import NotApplicableError, Stream
from kvalign.invariants.subject import Measured, Subject, in_precision, invariant, once

NUM_ROWS = 2
STRETCH = 32  # steps that a mean is taken over
MOST_APART = 16  # steps between two of which the KL is taken, so that it is of several texts
ERRORS = 3  # standard errors by which a mean may be above its bound
OTHER = 0.5  # error of a value that is another token's
GROWTH = 2.0  # what a mean of the last steps may be of that of the first
ENTRIES = 2.0  # what the error at a place of the cache may be of that of the newest entry
_FLOOR = 1e-4  # nats


@dataclass
class LongRun:
    """Figures of a long stream: [steps] of the parts.

    Attributes:
        first_errors, last_errors: of logits in half precision, relative to their size, before the
            first eviction and at the end.
        entries: [2, S] a step: errors of the first layer's keys and values, the newest last, at the
            end.
        most_apart: the largest error of any value of any layer and head, at the end.
        first_kl, last_kl: KL(re-encoded || stream) in nats, once only sinks are older than the
            first eviction, and at the end.
        unread_kl: the same for the last token alone, without any context.
        no_kl: why there is none.
    """

    num_steps: int
    first_errors: list[float] = field(default_factory=list)
    last_errors: list[float] = field(default_factory=list)
    entries: list[Tensor] = field(default_factory=list)
    most_apart: float = 0.0
    first_kl: list[float] = field(default_factory=list)
    last_kl: list[float] = field(default_factory=list)
    unread_kl: list[float] = field(default_factory=list)
    no_kl: str = ""


@once
@torch.no_grad()
def long_run(subject: Subject) -> LongRun:
    """Long stream of a subject."""
    subject.needs_eviction()
    half_model = in_precision(subject.model, subject.half)
    full_model = in_precision(half_model, torch.float32)  # the very same weights
    capacity = subject.capacity
    begin = 3 * capacity
    num = max(capacity + subject.num_steps, begin + 2 * STRETCH)
    run = LongRun(num)
    interval = min(MOST_APART, (num - begin) // (2 * STRETCH))
    first_kl = range(begin, begin + interval * STRETCH, interval)
    last_kl = range(num - 1, num - 1 - interval * STRETCH, -interval)
    ids = subject.written_ids(NUM_ROWS, num)
    half, full = (subject.stream(is_watched=True, model=m) for m in (half_model, full_model))
    progress.expect(num, "tokens")
    for i in range(num):
        token = ids[:, i : i + 1]
        logits, exact = half.feed(token), full.feed(token)
        if capacity - STRETCH <= i < capacity:
            run.first_errors.append(_logit_error(logits, exact))
        for steps, figures in ((first_kl, run.first_kl), (last_kl, run.last_kl)):
            if i in steps and not run.no_kl:
                _add_kl(run, figures, subject, full, exact)
        if i >= num - STRETCH:
            run.last_errors.append(_logit_error(logits, exact))
            if half.watched is not None and full.watched is not None:
                pairs = zip(half.watched.entries[0], full.watched.entries[0], strict=True)
                run.entries.append(torch.stack([_error(x, y, (0, 1, 3)) for x, y in pairs]))
                for layer, (_, values) in full.watched.entries.items():
                    error = _error(half.watched.entries[layer][1], values, (3,)).max()
                    run.most_apart = max(run.most_apart, float(error))
        for watched in filter(None, (half.watched, full.watched)):
            for births in watched.births[1:]:  # more than the first layer is not asked for
                births.clear()
        progress.advance(1)
    return run


def _error(actual: Tensor, exact: Tensor, over: tuple[int, ...]) -> Tensor:
    """Root mean square error relative to root mean square size, over some dimensions."""
    norm = torch.linalg.vector_norm
    return norm(actual.float() - exact, dim=over) / norm(exact, dim=over)


def _logit_error(logits: Tensor, exact: Tensor) -> float:
    """Same for logits [B, V] around their mean."""
    logits, exact = (x - x.mean(-1, keepdim=True) for x in (logits, exact))
    return float(_error(logits, exact, (0, 1)))


def _add_kl(
    run: LongRun, figures: list[float], subject: Subject, stream: Stream, logits: Tensor
) -> None:
    try:
        seen = [stream.seen(row) for row in range(NUM_ROWS)]
    except NotApplicableError as error:
        run.no_kl = str(error)
        return
    for row, tokens in enumerate(seen):
        target = subject.encoded(tokens[None], stream.model)[0, -1].log_softmax(-1)
        alone = subject.encoded(tokens[None, -1:], stream.model)[0, -1]
        figures.append(_kl(target, logits[row]))
        run.unread_kl.append(_kl(target, alone))


def _kl(target: Tensor, logits: Tensor) -> float:
    """KL in nats of logits [V] from log-probabilities [V]."""
    return float((target.exp() * (target - logits.log_softmax(-1))).sum())


def _error_of(figures: list[float]) -> float:
    """Standard error of their mean."""
    return statistics.stdev(figures) / math.sqrt(len(figures))


def _comparable(subject: Subject) -> LongRun:
    """Values carry no rotation, so one with a large difference belongs to another token."""
    run = long_run(subject)
    if run.most_apart > OTHER:
        raise NotApplicableError(
            "in half precision it keeps other tokens, so the two runs cannot be compared"
        )
    return run


@invariant(
    "in half precision old entries are as exact as new ones",
    unit="old by new",
    look_at="entries rounded at each move: move them rarely, from their original form, or in "
    "float32",
)
def half_entries(subject: Subject) -> Measured:
    run = _comparable(subject)
    if not run.entries:
        raise NotApplicableError("it re-encodes the kept tokens: there are no old entries")
    width = min(errors.shape[1] for errors in run.entries)
    errors = torch.stack([errors[:, -width:] for errors in run.entries]).mean(0)  # [2, S]
    ratios = errors / errors[:, -1:]
    kind, place = divmod(int(ratios.argmax()), width)
    note = (
        f"{('keys', 'values')[kind]}: {errors[kind, place]:.2g} at place {place} of {width}, "
        f"{errors[kind, -1]:.2g} of the newest, after {run.num_steps} tokens"
    )
    return Measured(float(ratios[kind, place]), ENTRIES, note)


@invariant(
    "in half precision errors do not grow with the stream",
    unit="last by first",
    look_at="positions, angles or sums kept in half precision",
)
def half_logits(subject: Subject) -> Measured:
    run = _comparable(subject)
    if subject.stream().has_memory:
        raise NotApplicableError("in half precision it takes back other entries from its memory")
    config = subject.model.config
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        raise NotApplicableError("in half precision its tokens go to other experts")
    first, last = statistics.fmean(run.first_errors), statistics.fmean(run.last_errors)
    note = f"errors of {first:.2g} before the first eviction, {last:.2g} after {run.num_steps}"
    return Measured(last / first if first else float("inf"), GROWTH, note + " tokens")


@invariant(
    "the distance to re-encoding is finite and does not grow with the stream",
    unit="nats",
    look_at="errors that accumulate at evictions: moves from moved entries, positions that run on",
)
def kl(subject: Subject) -> Measured:
    run = long_run(subject)
    if run.no_kl:
        raise NotApplicableError(run.no_kl)
    first, last, unread = map(statistics.fmean, (run.first_kl, run.last_kl, run.unread_kl))
    note = f"{first:.2g} early; with nothing but the last token it would be {unread:.2g}"
    error = math.hypot(GROWTH * _error_of(run.first_kl), _error_of(run.last_kl))
    return Measured(last, GROWTH * first + ERRORS * error + _FLOOR, note)
