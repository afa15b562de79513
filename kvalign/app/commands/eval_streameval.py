"""`kvalign eval streameval`: ask an endless stream for values registered some lines before."""

from dataclasses import dataclass

from kvalign.app.commands.stream_settings import ComparisonSettings
from kvalign.settings import option


@dataclass(frozen=True, kw_only=True)
class StreamEvalSettings(ComparisonSettings):
    """Ask for values registered some lines back in an endless stream: how far back a method, and
    the model itself, can read.

    Example:
        kvalign eval streameval --num-lines 20 --distances 0,5
    """

    distances: tuple[int, ...] = option(
        (0, 5, 10, 20, 40),
        help="lines back to ask for, a row each, comma-separated; 0: the latest line",
        at_least=0,
    )
    num_lines: int = option(200, help="lines of the stream, a value each", at_least=1)
    query_every: int = option(10, help="lines from one query to the next", at_least=1)
    seed: int = option(0, help="seed of the values, the same for each method and distance")
    json: bool = option(False, help="print one JSON document with settings and rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.num_lines - self.num_lines % self.query_every
        if last <= max(self.distances):
            raise ValueError(
                f"--num-lines {self.num_lines} and --query-every {self.query_every} put the last "
                f"query after line {last}, which must exceed the largest of --distances "
                f"({max(self.distances)}): raise --num-lines"
            )


def run(settings: StreamEvalSettings) -> None:
    import json

    from kvalign.eval.evaluations.streameval import evaluate
    from kvalign.eval.rows import as_text

    result = evaluate(settings)
    print(json.dumps(result) if settings.json else as_text(result["rows"]))
