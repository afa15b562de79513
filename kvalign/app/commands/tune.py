"""`kvalign tune`: search for the sizes and the learning rate of one network."""

from pathlib import Path
from typing import Any

from kvalign.app.cli.next_steps import say_written
from kvalign.app.commands.train import say_use_of, verdict_lines
from kvalign.training.settings import TuneSettings

_DIGITS = {"lr": "{:.3g}", "val_loss": "{:.6g}", "seconds": "{:.1f}"}


def tune(settings: TuneSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.foundation.console import Heading, print_table
    from kvalign.training import tune_network

    result = tune_network(settings)
    if as_json:
        return result
    best, val_loss = result["best"], result["aligner_val_loss"]
    print(
        (
            f"{result['aligner']}: val loss {val_loss:.6g}, trained again from trial "
            f"{best['trial']}, which had {best['val_loss']:.6g} (ratio "
            f"{val_loss / best['val_loss']:.4f}); input-label MSE {result['input_label_mse']:.6g}"
        )
        + ("" if result["used"] else "; not used: entries stay unchanged")
    )
    print_table(
        [Heading(name, is_number=name not in ("trial", "state")) for name in best],
        [[_text(name, value) for name, value in row.items()] for row in result["trials"]],
    )
    if "judged" in result:
        print(*verdict_lines(result["judged"]), sep="\n")
    say_written(settings.folder)
    say_use_of(Path(result["aligner"]))
    return result


def _text(name: str, value: object) -> str:
    return "" if value is None else _DIGITS.get(name, "{}").format(value)
