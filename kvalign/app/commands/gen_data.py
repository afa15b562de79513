"""`kvalign gen-data`: record KV caches before and after eviction, what aligners are trained on."""

from kvalign.data_gen.settings import RecordSettings

SETTINGS = RecordSettings


def run(settings: RecordSettings, as_json: bool) -> None:
    import json
    import sys

    from kvalign.data_gen.recording import record
    from kvalign.models import load_model

    store, was_finished = record(settings, load_model(settings.model, settings.device))
    if was_finished:
        print(f"{settings.out} is finished already: nothing to do", file=sys.stderr)
    found = {name: store.manifest[name] for name in ("num_chunks", "num_rows", "input_label_mse")}
    if as_json:
        print(json.dumps({"out": str(settings.out), "finished_already": was_finished, **found}))
        return
    for split, num_rows in found["num_rows"].items():
        print(
            f"{split}: {num_rows} rows each of key and value ({found['num_chunks'][split]} chunks)"
        )
    for target, by_shift in found["input_label_mse"].items():
        for num_evicted, mse in by_shift.items():
            print(f"{target}: input-label MSE {mse:.6g} (k={num_evicted})")
