"""The thread that steps a model: rows of requests join and leave its batches.

Each round first feeds parts of new prompts, of at most `PART` tokens, for about as long as a step
takes; a change of a state counts as a part. Then it steps every row by one token. So new prompts do
not delay the others. A prompt is fed alone and then joins the rows with as many sinks.
"""

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvalign.app.serve.cache_view import Watch
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.turn import OUR_FAULT, AnswerRow, Turn, states_of
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import give_back
from kvalign.methods.base import Method
from kvalign.streaming.loop import Batch

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.requests = counter("kvalign_requests", "requests by path, status", ("path", "status"))
        self.generated = counter("kvalign_generated_tokens", "tokens chosen")
        self.num_fed = counter("kvalign_prompt_tokens", "tokens of prompts fed")
        self.first = seconds(
            "kvalign_time_to_first_token_seconds", "from the queue to the first token"
        )
        self.between = seconds("kvalign_time_between_tokens_seconds", "between tokens of an answer")
        self.streams = gauge("kvalign_streams", "answers being written")
        self.waiting = gauge("kvalign_waiting", "requests that wait")
        self.sessions = gauge("kvalign_sessions", "stored sessions")

    def text(self) -> bytes:
        return generate_latest(self.registry)


log = logging.getLogger(__name__)
Kind = tuple[str, CacheSizes]
"""Title and sizes of a method: rows of equal ones share a batch."""
PART = 512
GIVE_BACK_S = 10.0
"""Seconds between two returns of freed memory to the system."""
SHUTTING_DOWN = RequestError("the server is shutting down", 503, code="shutting_down")


class Engine(threading.Thread):
    """Thread that owns the model.

    `max_streams` is the number of rows, including prompts that are being fed. `max_queue` is the
    number of turns that may wait for a place.
    """

    def __init__(self, max_streams: int, max_queue: int, metrics: Metrics):
        super().__init__(name="kvalign-engine", daemon=True)
        self.max_streams, self.max_queue, self.metrics = max_streams, max_queue, metrics
        self._waiting: deque[Turn] = deque()
        self._feeding: deque[Turn] = deque()
        self._batches: dict[Kind, Batch[AnswerRow]] = {}
        self._wakes, self._is_stopping = threading.Condition(), False
        self.num_rows, self._step_s = 0, 0.0

    def submit(self, turns: Sequence[Turn]) -> None:
        """Queue turns until there are places for them; RequestError (429) if too many wait."""
        with self._wakes:
            if self._is_stopping or not self.is_alive():
                raise SHUTTING_DOWN
            num = len(self._waiting)
            if num + len(turns) > self.max_queue + self.num_free:
                what = f"{num} requests are waiting, the most are {self.max_queue}"
                raise RequestError(what, 429, code="rate_limit_exceeded")
            self._waiting.extend(turns)
            self._wakes.notify()

    def stop(self) -> None:
        with self._wakes:
            self._is_stopping = True
            self._wakes.notify()
        self.join()

    @property
    def num_free(self) -> int:
        return self.max_streams - self.num_rows

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @torch.no_grad()
    def run(self) -> None:
        last_return_s = time.monotonic()
        while True:
            pause_s: float | None = GIVE_BACK_S
            with self._wakes:
                while not (self._is_stopping or self._waiting or self._feeding or self._batches):
                    if not self._wakes.wait(pause_s):
                        give_back()
                        pause_s = None
                if self._is_stopping:
                    break
                self._drop_cancelled()
                self._admit()
            self._feed()
            self._step_all()
            self._count()
            if time.monotonic() - last_return_s > GIVE_BACK_S:
                give_back()  # prompts and rows of any length leave holes
                last_return_s = time.monotonic()
        turns = [*self._waiting, *self._feeding]
        turns += [row.turn for batch in self._batches.values() for row in batch.rows]
        for turn in dict.fromkeys(turns):
            turn.failed(SHUTTING_DOWN)

    def _admit(self) -> None:
        while self._waiting and len(self._waiting[0].rows) <= self.num_free:
            self._feeding.append(self._waiting.popleft())
            self.num_rows += len(self._feeding[-1].rows)

    def _drop_cancelled(self) -> None:
        for turns in (self._waiting, self._feeding):
            for turn in [turn for turn in turns if turn.is_cancelled]:
                turns.remove(turn)
        for batch in self._batches.values():
            try:
                batch.leave()
            except Exception as error:
                self._fail_all(batch, error)
        self._count()

    def _count(self) -> None:
        """Count the rows, and drop batches without one."""
        self._batches = {num: batch for num, batch in self._batches.items() if batch.rows}
        feeding = sum(len(turn.rows) for turn in self._feeding)
        self.num_rows = feeding + sum(len(batch.rows) for batch in self._batches.values())

    def _feed(self) -> None:
        """Feed parts of prompts; complete ones choose their first tokens and join."""
        by_kind = defaultdict[Kind, list[tuple[Method, list[AnswerRow]]]](list)
        end = time.perf_counter() + self._step_s
        for number in itertools.count():
            if not self._feeding or (number and time.perf_counter() > end):
                break
            turn = self._feeding.popleft()
            try:
                turn.restore()
                if turn.changes:  # one after the other, like parts: they delay nobody
                    self.metrics.num_fed.inc(turn.change(PART))
                    self._feeding.append(turn)
                    continue
                part, turn.rest = turn.rest[:PART], turn.rest[PART:]
                logits = turn.method.feed(part[None].to(turn.method.model.device))
                self.metrics.num_fed.inc(len(part))
                if len(turn.rest):
                    self._feeding.append(turn)
                    continue
                rows = turn.begin()
                for row in rows:
                    row.choose(logits, turn.method)
                self._report(rows, turn.method)
                if going := [row for row in rows if not row.has_ended()]:
                    if len(rows) > 1:
                        turn.method.select([0] * len(going))
                    by_kind[turn.method.title, turn.method.sizes].append((turn.method, going))
            except Exception as error:
                self._fail([turn], error)
        for kind, pairs in by_kind.items():
            methods = [method for method, _ in pairs]
            batch = self._batches.setdefault(kind, Batch(methods[0]))
            try:
                batch.join([row for _, rows in pairs for row in rows], methods)
            except Exception as error:
                self._fail_all(batch, error)

    def _step_all(self) -> None:
        start_s = time.perf_counter()
        for batch in self._batches.values():
            try:
                if any(row.is_cache_due() for row in batch.rows):
                    with Watch(batch.method) as watch:
                        rows = batch.step()
                    self._report(rows, batch.method, watch)
                elif batch.rows:
                    self._report(batch.step(), batch.method)
                batch.leave()
            except Exception as error:
                self._fail_all(batch, error)
        self._step_s = time.perf_counter() - start_s

    def _report(
        self, rows: Sequence[AnswerRow], method: Method, watch: Watch | None = None
    ) -> None:
        """Count the tokens that rows have taken; notify the turns of those that end, or failed."""
        now = time.perf_counter()
        for i, row in enumerate(rows):
            if row.failure is None:
                self.metrics.generated.inc()
                is_first = len(row.token_ids) == 1
                seconds = self.metrics.first if is_first else self.metrics.between
                seconds.observe(now - row.since_s)
                row.since_s = now
                if row.place is not None and (watch or is_first):
                    row.tell_cache(row.place, watch.recalled(i, row.place) if watch else [])
        whole = [i for i, row in enumerate(rows) if row.turn.update and row.is_whole]
        states = dict(zip(whole, states_of(method, whole), strict=True))
        for i, row in enumerate(rows):
            if row.is_whole:
                row.turn.ended(row, states.get(i))
            elif row.failure is not None:
                row.turn.is_cancelled = True  # its other rows have the same prompt
                row.turn.failed(row.failure)

    def _fail_all(self, batch: Batch[AnswerRow], error: Exception) -> None:
        self._fail((row.turn for row in batch.rows), error)
        batch.rows = []

    def _fail(self, turns: Iterable[Turn], error: Exception) -> None:
        if isinstance(error, UserError):
            answer = RequestError(str(error))
        else:
            log.error("a step failed", exc_info=error)
            answer = OUR_FAULT
        for turn in dict.fromkeys(turns):
            turn.is_cancelled = True
            turn.failed(answer)
