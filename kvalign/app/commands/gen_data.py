"""`kvalign gen-data`: record KV caches before and after eviction, to train aligners on."""

import sys
from typing import Any

from kvalign.app.cli.next_steps import of_model, say_next
from kvalign.data_gen.settings import RecordSettings


def gen_data(settings: RecordSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.data_gen.recording import record
    from kvalign.foundation.folders import MANIFEST

    out = settings.folder
    was_finished = (out / MANIFEST).exists()
    manifest = record(settings).manifest
    if was_finished:
        print(f"{out} is already finished: nothing to do", file=sys.stderr)
    if not as_json:
        for split, num_rows in manifest.num_rows.items():
            num_chunks = manifest.num_chunks[split]
            print(f"{split}: {num_rows} rows each of key and value ({num_chunks} chunks)")
        for kv, by_shift in manifest.input_label_mse.items():
            for num_evicted, mse in by_shift.items():
                print(f"{kv}: input-label MSE {mse:.6g} (k={num_evicted})")
        print(f"recording: {out}")
        where = of_model(settings.model) if settings.out is None else ["--data", out]
        say_next("train", "--target", "key", *where)
    about = manifest.model_dump(mode="json", exclude={"shards"})
    return {"out": str(out), "finished_already": was_finished, **about}
