"""The one loop that steps a model: rows join and leave it, on a thread of its own.

Each round first feeds parts of new prompts, of at most `PART` tokens, for about as long as a step
takes. Then it steps every row by one token. So new prompts do not delay the others. A prompt is fed
alone and then joins the rows with as many sinks.
"""

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.metrics import Metrics
from kvalign.app.serve.turn import Row, Turn, states_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.memory import give_back
from kvalign.methods.base import Method
from kvalign.streaming.health import most_likely

log = logging.getLogger(__name__)
PART = 512
GIVE_BACK_S = 10.0
"""Seconds between two returns of freed memory to the system."""
NOT_FINITE = RequestError("the model's logits for this text are not finite", 500, code="not_finite")
OUR_FAULT = RequestError("an error of the server ended this answer", 500, code="stream_failed")
Pairs = list[tuple[Turn, Row]]


@dataclass
class _Group:
    """Rows that are stepped together: a batch of a method, and the owners of its rows."""

    batch: Method
    rows: Pairs = field(default_factory=list)


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", 503, code="shutting_down")


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
        self._groups: dict[int, _Group] = {}
        self._wakes, self._is_stopping = threading.Condition(), False
        self.num_rows, self._step_s = 0, 0.0

    def submit(self, turns: Sequence[Turn]) -> None:
        """Queue turns until there are places for them; RequestError (429) if too many wait."""
        with self._wakes:
            if self._is_stopping or not self.is_alive():
                raise _shutting_down()
            num = len(self._waiting)
            if num + len(turns) > self.max_queue + self.num_free:
                raise RequestError(
                    f"{num} requests are waiting, the most are {self.max_queue}",
                    429,
                    code="rate_limit_exceeded",
                )
            self._waiting.extend(turns)
            self._wakes.notify()

    def stop(self) -> None:
        """Stop all turns."""
        with self._wakes:
            self._is_stopping = True
            self._wakes.notify()
        self.join()

    @property
    def num_free(self) -> int:
        """Free places."""
        return self.max_streams - self.num_rows

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @torch.no_grad()
    def run(self) -> None:
        given_back_s = time.monotonic()
        while True:
            pause_s: float | None = GIVE_BACK_S
            with self._wakes:
                while not (self._is_stopping or self._waiting or self._feeding or self._groups):
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
            if time.monotonic() - given_back_s > GIVE_BACK_S:
                give_back()  # prompts and rows of any length leave holes
                given_back_s = time.monotonic()
        turns = [*self._waiting, *self._feeding]
        turns += [turn for group in self._groups.values() for turn, _ in group.rows]
        for turn in dict.fromkeys(turns):
            turn.failed(_shutting_down())

    def _admit(self) -> None:
        while self._waiting and len(self._waiting[0].rows) <= self.num_free:
            self._feeding.append(self._waiting.popleft())
            self.num_rows += len(self._feeding[-1].rows)

    def _drop_cancelled(self) -> None:
        for turns in (self._waiting, self._feeding):
            for turn in [turn for turn in turns if turn.is_cancelled]:
                turns.remove(turn)
        for num_sinks, group in list(self._groups.items()):
            try:
                self._keep(group, [not turn.is_cancelled for turn, _ in group.rows])
            except Exception as error:
                self._fail_all(group, error)
            self._drop_empty(num_sinks)
        self._count()

    def _drop_empty(self, num_sinks: int) -> None:
        if not self._groups[num_sinks].rows:
            del self._groups[num_sinks]

    def _count(self) -> None:
        feeding = sum(len(turn.rows) for turn in self._feeding)
        self.num_rows = feeding + sum(len(group.rows) for group in self._groups.values())

    def _feed(self) -> None:
        """Feed parts of prompts; complete ones choose their first tokens and join."""
        begun = defaultdict[int, Pairs](list)
        end = time.perf_counter() + self._step_s
        for number in itertools.count():
            if not self._feeding or (number and time.perf_counter() > end):
                break
            turn = self._feeding.popleft()
            part, turn.left = turn.left[:PART], turn.left[PART:]
            try:
                if turn.state is not None:
                    turn.method.restore(turn.state)
                    turn.state = None
                logits = turn.method.feed(part[None].to(turn.method.model.device))
                self.metrics.fed.inc(len(part))
                if len(turn.left):
                    self._feeding.append(turn)
                    continue
                pairs = [(turn, row) for row in turn.rows]
                self._choose(pairs, logits.expand(len(pairs), -1), turn.method)
                going = self._ended(pairs, turn.method)
            except Exception as error:
                self._fail([turn], error)
                going = []
            if not going:
                continue
            if len(turn.rows) > 1:
                turn.method.select([0] * len(going))
            begun[turn.method.sizes.num_sinks] += going
        for num_sinks, pairs in begun.items():
            methods = [turn.method for turn in dict.fromkeys(turn for turn, _ in pairs)]
            if num_sinks not in self._groups:
                self._groups[num_sinks] = _Group(methods.pop(0))
            group = self._groups[num_sinks]
            group.rows += pairs
            try:
                group.batch.join(methods)
            except Exception as error:
                self._fail_all(group, error)
            for method in methods:
                method.reset()  # its turn goes on, in the batch

    def _step_all(self) -> None:
        begun_s = time.perf_counter()
        for num_sinks, group in list(self._groups.items()):
            try:
                if group.rows:
                    self._step(group)
            except Exception as error:
                self._fail_all(group, error)
            self._drop_empty(num_sinks)
        self._step_s = time.perf_counter() - begun_s

    def _step(self, group: _Group) -> None:
        rows = [row for _, row in group.rows]
        if len(rows) == 1 and rows[0].lookup is not None:
            logits = rows[0].lookup.feed(group.batch)
        else:
            tokens = [[row.token_ids[-1]] for row in rows]
            logits = group.batch.feed(torch.tensor(tokens, device=group.batch.model.device))
        self._choose(group.rows, logits, group.batch)
        self._ended(group.rows, group.batch)
        self._keep(group, [not row.finish for _, row in group.rows])

    def _choose(self, pairs: Pairs, logits: Tensor, batch: Method) -> None:
        """Let rows take their next tokens, from logits [B, V]; a failed row ends alone."""
        best, is_one = (x.tolist() for x in most_likely(logits))
        now = time.perf_counter()
        for i, (_, row) in enumerate(pairs):
            if not is_one[i]:
                row.finish = "sick"
                continue
            try:
                chosen = best[i]
                if not row.chooser.is_bare:
                    chosen = int(row.chooser.choose(logits[i : i + 1], batch))
                row.take(chosen)
            except Exception as error:
                log.error("a token could not be taken", exc_info=error)
                row.finish = "failed"
                continue
            self.metrics.generated.inc()
            is_first = len(row.token_ids) == 1
            (self.metrics.first if is_first else self.metrics.between).observe(now - row.since_s)
            row.since_s = now

    def _ended(self, pairs: Pairs, batch: Method) -> Pairs:
        """Notify the turns of rows that have ended; return the others."""
        kept = [i for i, (turn, row) in enumerate(pairs) if turn.keeps and row.is_whole]
        states = dict(zip(kept, states_of(batch, kept), strict=True))
        going = []
        for i, (turn, row) in enumerate(pairs):
            if not row.finish:
                going.append((turn, row))
            elif row.is_whole:
                turn.ended(row, states.get(i))
            else:
                turn.is_cancelled = True  # its other rows have the same prompt
                turn.failed(NOT_FINITE if row.finish == "sick" else OUR_FAULT)
        return going

    def _keep(self, group: _Group, goes_on: list[bool]) -> None:
        if not all(goes_on):
            rows = [i for i, goes in enumerate(goes_on) if goes]
            if rows:
                group.batch.select(rows)
            group.rows = [group.rows[i] for i in rows]

    def _fail_all(self, group: _Group, error: Exception) -> None:
        self._fail((turn for turn, _ in group.rows), error)
        group.rows = []

    def _fail(self, turns: Iterable[Turn], error: Exception) -> None:
        """End turns with an error of their step."""
        if isinstance(error, UserError):
            answer = RequestError(str(error))
        else:
            log.error("a step failed", exc_info=error)
            answer = OUR_FAULT
        for turn in dict.fromkeys(turns):
            turn.is_cancelled = True
            turn.failed(answer)
