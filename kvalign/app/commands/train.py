"""`kvalign train`: train an aligner; each kind has flags of its own."""

import dataclasses
import shlex
from collections.abc import Sequence

from kvalign.aligners.kinds import KINDS
from kvalign.aligners.network_sizes import KV
from kvalign.app.arguments import OneLineParser
from kvalign.errors import UserError
from kvalign.settings import Settings, fields_of, option
from kvalign.training.kinds import trainer_of
from kvalign.training.settings import TrainSettings

DEFAULT_KIND = "network"


def settings_for(args: Sequence[str] = ()) -> type[Settings]:
    """The settings of the kind that the arguments name, and `--aligner-kind`.

    Raises:
        UserError: an unknown kind, or a flag that another kind has.
    """
    parser = OneLineParser("kvalign train", add_help=False, allow_abbrev=False)
    parser.add_argument("--aligner-kind", default=DEFAULT_KIND)
    kind = parser.parse_known_args(args)[0].aligner_kind
    cls = _with_kind(trainer_of(kind).SETTINGS)
    words = (word.partition("=")[0].replace("--no-", "--") for word in args)
    given = {word for word in words if word.startswith("--")}
    for flag in sorted(given - cls.flags()):
        others = [other for other in KINDS if flag in trainer_of(other).SETTINGS.flags()]
        if others:
            raise UserError(f"{flag} is for --aligner-kind {' or '.join(others)}, not {kind}")
    return cls


def all_settings() -> dict[str, type[Settings]]:
    """The settings of every kind, by its name."""
    return {kind: _with_kind(trainer_of(kind).SETTINGS) for kind in KINDS}


def run(settings: Settings, as_json: bool) -> None:
    import json

    values = {field.name: getattr(settings, field.name) for field in fields_of(type(settings))}
    kind = values.pop("aligner_kind")
    trainer = trainer_of(kind)
    one = trainer.SETTINGS(**values)
    results = trainer.train(one)
    if not results:  # of a process that helps another
        return
    if as_json:
        print(json.dumps(results))
        return
    for kv, result in results.items():
        ratio = "none" if result["ratio"] is None else f"{result['ratio']:.4f}"
        print(
            f"{kv}: val loss {result['val_loss']:.6g}, "
            f"input-label MSE {result['input_label_mse']:.6g}, "
            f"ratio {ratio} (lower is better; 1 leaves entries as they are)"
            + ("" if result["used"] else "; not used: entries stay as they are")
        )
    print(f"aligner: {one.folder(kind)}")
    _say_next(one, kind)


def _say_next(settings: TrainSettings, kind: str) -> None:
    """The other network, where one is trained at a time and that is left; then, to stream."""
    from kvalign.aligners import AlignerConfig
    from kvalign.aligners.base import CONFIG
    from kvalign.app.next_steps import of_model, say_next
    from kvalign.files import read_checked

    out = settings.folder(kind)
    config = read_checked(AlignerConfig, out / CONFIG)
    for kv in KV:
        if kind == "network" and kv not in config.training:
            other = dataclasses.replace(settings, target=kv)
            say_next(*shlex.split(other.command_line("train", leave_out=("overwrite",)))[1:])
    say_next("generate", "--method", "kvalign", *of_model(config.base_model), "--aligner", out)


def _with_kind(cls: type[Settings]) -> type[Settings]:
    """The settings of a kind and the choice of it."""
    field = option(DEFAULT_KIND, help="what to train: each has its flags", choices=tuple(KINDS))
    return dataclasses.make_dataclass(
        cls.__name__,
        [("aligner_kind", str, field)],
        bases=(cls,),
        namespace={"__doc__": cls.__doc__},
        frozen=True,
        kw_only=True,
    )
