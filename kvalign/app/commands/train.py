"""`kvalign train`: train an aligner on recorded caches."""

from kvalign.training.settings import TrainSettings

SETTINGS = TrainSettings


def run(settings: TrainSettings, as_json: bool) -> None:
    import json

    if settings.aligner_kind == "network":
        from kvalign.training.network_run import train
    else:
        from kvalign.training.table_run import train

    results = train(settings)
    if as_json and results:
        print(json.dumps(results))
        return
    for target, found in results.items():
        ratio = "none" if found["ratio"] is None else f"{found['ratio']:.4f}"
        print(
            f"{target}: val loss {found['val_loss']:.6g}, "
            f"input-label MSE {found['input_label_mse']:.6g}, "
            f"ratio {ratio} (lower is better; 1 leaves entries as they are)"
            + ("" if found["used"] else "; not used: entries stay as they are")
        )
