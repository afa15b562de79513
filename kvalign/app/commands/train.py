"""`kvalign train`: train an aligner. Each kind has its own flags."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.aligners.kinds import KINDS
from kvalign.aligners.network_sizes import TARGETS
from kvalign.app.cli.arguments import OneLineParser
from kvalign.app.cli.next_steps import of_model, say_generate, say_next
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import Settings, option
from kvalign.training.kinds import trainer_of
from kvalign.training.settings import TrainSettings

if TYPE_CHECKING:
    from kvalign.aligners import AlignerConfig

DEFAULT_KIND = "table"
OF_NETWORKS = {"--target", "--data"}
"""Flags that imply a network if no kind is named."""


def settings_for(args: Sequence[str] = ()) -> type[Settings]:
    """The settings class of the kind that the arguments name, and `--aligner-kind`. Without that
    flag it is the first kind that has all the given flags, beginning with the default; or
    `network`, if its data or a target is given. UserError names the kind that has a flag which this
    one lacks.
    """
    parser = OneLineParser("kvalign train", add_help=False, allow_abbrev=False)
    parser.add_argument("--aligner-kind")
    kind = parser.parse_known_args(args)[0].aligner_kind
    words = (word.partition("=")[0].replace("--no-", "--") for word in args)
    names = {word for word in words if word.startswith("--")}
    kind = kind or _kind_of(names)
    cls = _with_kind(kind)
    for flag in sorted(names - cls.flags()):
        others = [other for other in KINDS if flag in trainer_of(other).SETTINGS.flags()]
        if others:
            raise UserError(f"{flag} is for --aligner-kind {' or '.join(others)}, not {kind}")
    return cls


def all_settings() -> dict[str, type[Settings]]:
    """The settings class of every kind, by name."""
    return {kind: _with_kind(kind) for kind in KINDS}


def run(settings: Settings, as_json: bool) -> dict[str, Any] | None:
    values = dict(vars(settings))
    kind = values.pop("aligner_kind")
    trainer = trainer_of(kind)
    one = trainer.SETTINGS(**values)
    results = trainer.train(one)
    if as_json or not results:  # of a process that helps another
        return results or None
    for kv, result in results.items():
        ratio = "none" if result["ratio"] is None else f"{result['ratio']:.4f}"
        print(
            (
                f"{kv}: val loss {result['val_loss']:.6g}, input-label MSE "
                f"{result['input_label_mse']:.6g}, ratio {ratio} (lower is better; 1 is no "
                "improvement)"
            )
            + ("" if result["used"] else f"; not used: {kv}s stay unchanged")
        )
    if "judged" in result:
        print(*verdict_lines(result["judged"]), sep="\n")
    elif kind == "network":
        print("judged only by the error of one move: measure streams with kvalign eval perplexity")
    print(f"aligner: {one.folder(kind)}")
    _say_next(one, kind)
    return results


def _say_next(settings: TrainSettings, kind: str) -> None:
    """Name the other network, if one is left to train; then `generate`."""
    from kvalign.aligners import AlignerConfig
    from kvalign.aligners.config import CONFIG
    from kvalign.foundation.files import read_checked

    out = settings.folder(kind)
    config = read_checked(AlignerConfig, out / CONFIG)
    for kv in TARGETS:
        if kind == "network" and kv not in config.training:
            other = dataclasses.replace(settings, target=kv)
            say_next(*shlex.split(other.command_line("train", leave_out=("overwrite",)))[1:])
    say_use_of(config, out)


def say_use_of(config: AlignerConfig, out: Path) -> None:
    """Name `generate` with an aligner, or without one that changes nothing."""
    if any(part["used"] for part in config.training.values()):
        say_generate(config.base_model, out)
    else:
        say_next("generate", *of_model(config.base_model))


def verdict_lines(judged: dict[str, Any]) -> list[str]:
    """Return the result of `kvalign.training.judge.judge` in words. It compares streams with equal
    sinks, so that they differ only in the aligner. The sinks are the chosen ones, unless no aligner
    was streamed with them: a network uses only the usual ones.
    """
    own_sinks = judged["num_sinks"]
    tried_with = [row["num_sinks"] for row in judged["streams"] if row["parts"]]
    num_sinks = own_sinks if own_sinks in tried_with else tried_with[0]
    losses = {
        tuple(row["parts"]): row["val_nll"]
        for row in judged["streams"]
        if row["num_sinks"] == num_sinks
    }

    def figures(parts: tuple[str, ...]) -> str:
        what = " and ".join(f"{kv}s" for kv in parts)
        return f"{math.exp(losses[parts]):.4g} with {what} realigned"

    lines = [
        f"perplexity of {judged['num_labels']} held-out tokens, streamed with caches of "
        f"{', '.join(map(str, judged['cache_sizes']))} and {num_sinks} sinks: "
        f"{math.exp(losses[()]):.4g} with streaming-llm, {math.exp(judged['discard_half']):.4g} "
        f"with discard-half{f' of {own_sinks} sinks' * (own_sinks != num_sinks)}{_beside(judged)}"
    ]
    if judged["parts"]:
        return [*lines, f"used: {figures(tuple(judged['parts']))}"]
    tried = min((parts for parts in losses if parts), key=losses.__getitem__)
    why = (
        "is not distinguishable from streaming-llm"
        if losses[tried] < losses[()]
        else "is no better"
    )
    what = f"streaming-llm with {own_sinks} sinks"
    return [
        *lines,
        (f"not used: {figures(tried)} {why}; the saved aligner changes nothing and equals {what}"),
    ]


def _beside(judged: dict[str, Any]) -> str:
    """Figure of the shipped aligner, if there is one."""
    shipped = judged.get("shipped")
    return f"; {math.exp(shipped['val_nll']):.4g} with {shipped['aligner']}" if shipped else ""


def _kind_of(names: set[str]) -> str:
    """Kind that the flags imply."""
    first = "network" if names & OF_NETWORKS else DEFAULT_KIND
    flags = {kind: trainer_of(kind).SETTINGS.flags() for kind in (first, *KINDS)}
    own = names & set().union(*flags.values())
    return next((kind for kind in flags if own <= flags[kind]), first)


def _with_kind(kind: str) -> type[Settings]:
    """Settings of a kind with the choice of it."""
    cls = trainer_of(kind).SETTINGS
    note = "each kind has its own flags, which imply it; --target or --data alone imply network"
    field = option(kind, help=f"what to train: {note}", choices=tuple(KINDS))
    return dataclasses.make_dataclass(
        cls.__name__,
        [("aligner_kind", str, field)],
        bases=(cls,),
        namespace={"__doc__": cls.__doc__, "command_line": _command_line},
        frozen=True,
        kw_only=True,
    )


def _command_line(settings: Settings, command: str, leave_out: tuple[str, ...] = ()) -> str:
    """Shell command that always names the kind."""
    words = Settings.command_line(settings, command, leave_out)
    return f"{words} --aligner-kind {getattr(settings, 'aligner_kind')}"  # noqa: B009
