"""Prometheus metrics."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.requests = counter(
            "kvalign_requests", "requests by path and status", ("path", "status")
        )
        self.generated = counter("kvalign_generated_tokens", "tokens chosen")
        self.num_fed = counter("kvalign_prompt_tokens", "tokens of prompts fed")
        self.first = seconds(
            "kvalign_time_to_first_token_seconds",
            "from a request's place in the queue to its first token",
        )
        self.between = seconds(
            "kvalign_time_between_tokens_seconds", "between two tokens of an answer"
        )
        self.streams = gauge("kvalign_streams", "answers being written")
        self.waiting = gauge("kvalign_waiting", "requests that wait")
        self.sessions = gauge("kvalign_sessions", "stored sessions")

    def text(self) -> bytes:
        """All metrics, in Prometheus' text form."""
        return generate_latest(self.registry)
