"""`kvalign tune`: sweep the sizes and the learning rate of one network."""

from kvalign.training.settings import TuneSettings

SETTINGS = TuneSettings


def run(settings: TuneSettings, as_json: bool) -> None:
    import json
    import sys

    from kvalign.training.sweep import sweep
    from kvalign.training.sweep_report import as_markdown

    try:
        result = sweep(settings)
    except RuntimeError as error:
        print(f"kvalign tune: stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    if as_json:
        print(json.dumps(result))
        return
    best, val_loss = result["best"], result["aligner_val_loss"]
    print(
        f"{result['aligner']}: val loss {val_loss:.6g}, trained anew as trial {best['trial']}, "
        f"which had {best['val_loss']:.6g} (ratio {val_loss / best['val_loss']:.4f}); input-label "
        f"MSE {result['input_label_mse']:.6g}"
        + ("\n" if result["used"] else "; not used: entries stay as they are\n")
    )
    print(as_markdown(result["trials"]), end="")
