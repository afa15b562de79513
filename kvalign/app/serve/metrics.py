"""What Prometheus is told."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvalign_requests", "requests by path and status", ("path", "status"), registry=registry
        )
        self.generated = Counter("kvalign_generated_tokens", "tokens chosen", registry=registry)
        self.fed = Counter("kvalign_prompt_tokens", "tokens of prompts fed", registry=registry)
        self.first = Histogram(
            "kvalign_time_to_first_token_seconds",
            "from a request's place in the queue to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between = Histogram(
            "kvalign_time_between_tokens_seconds",
            "between two tokens of an answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.streams = Gauge("kvalign_streams", "answers being written", registry=registry)
        self.waiting = Gauge("kvalign_waiting", "requests that wait", registry=registry)
        self.sessions = Gauge("kvalign_sessions", "sessions that are kept", registry=registry)

    def text(self) -> bytes:
        """All of them, in Prometheus' text form."""
        return generate_latest(self.registry)
