"""`kvalign eval latency`: time and memory of all methods, side by side in one run."""

from kvalign.eval.settings import LatencySettings

SETTINGS = LatencySettings


def run(settings: LatencySettings, as_json: bool) -> None:
    import json

    from kvalign.eval.evaluations.latency import measure
    from kvalign.eval.rows import as_text

    result = measure(settings)
    print(json.dumps(result) if as_json else as_text(result["rows"]))
