"""`kvalign train KIND`: train an aligner of a kind, each of which has its own flags."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalign.aligners.kinds import KINDS, TARGETS
from kvalign.app.cli.arguments import OneLineParser
from kvalign.app.cli.next_steps import of_model, say_generate, say_next
from kvalign.foundation.errors import UserError
from kvalign.foundation.registry import unknown
from kvalign.foundation.settings import Settings, settings_of
from kvalign.training.kinds import TRAINERS
from kvalign.training.settings import TrainSettings

OF_NETWORKS = {"--target", "--data"}
"""Flags that mean a network if no kind is named."""


def kind_and_flags(args: Sequence[str]) -> tuple[str, list[str]]:
    """The kind, which may be left out, and the flags after it. UserError names the kinds that have
    a flag which this one lacks.
    """
    kind, flags = args[0] if args else "", [*args[1:]]
    names = {word.partition("=")[0].replace("--no-", "--") for word in args if word[:2] == "--"}
    if kind[:1] in ("", "-"):
        older = OneLineParser("kvalign train", add_help=False, allow_abbrev=False)
        older.add_argument("--aligner-kind", default="network" if names & OF_NETWORKS else "table")
        known, flags = older.parse_known_args(args)
        kind = known.aligner_kind
    if kind not in KINDS:
        raise UserError(unknown(KINDS.what, kind, KINDS))
    flags_of = {name: cls.flags() for name, cls in all_settings().items()}
    for name in sorted(names - flags_of[kind]):
        if others := [other for other in KINDS if name in flags_of[other]]:
            raise UserError(f"{name} is for kvalign train {' or '.join(others)}, not {kind}")
    return kind, flags


def all_settings() -> dict[str, type[TrainSettings]]:
    """The settings class of every kind, by name."""
    return {kind: settings_of(TRAINERS[kind]) for kind in KINDS}


def train(settings: TrainSettings, as_json: bool) -> dict[str, Any] | None:
    kind = settings.aligner_kind
    results = TRAINERS[kind](settings)
    if as_json or not results:  # of a process that helps another
        return results or None
    for kv, result in results.items():
        ratio = "none" if result["ratio"] is None else f"{result['ratio']:.4f}"
        use = "" if result["used"] else f"; not used: {kv}s stay unchanged"
        print(
            f"{kv}: val loss {result['val_loss']:.6g}, input-label MSE "
            f"{result['input_label_mse']:.6g}, ratio {ratio} (lower is better; 1 is no "
            f"improvement){use}"
        )
    if "judged" in result:
        print(*verdict_lines(result["judged"]), sep="\n")
    elif kind == "network":
        print("judged only by the error of one move: measure streams with kvalign eval perplexity")
    print(f"aligner: {settings.folder}")
    say_use_of(settings.folder, settings)
    return results


def say_use_of(out: Path, settings: TrainSettings | None = None) -> None:
    """Name the other network, if these settings left one to train; then `generate` with an aligner,
    or without one that changes nothing.
    """
    from kvalign.aligners import AlignerConfig
    from kvalign.aligners.config import CONFIG
    from kvalign.foundation.files import read_checked

    config = read_checked(AlignerConfig, out / CONFIG)
    for kv in TARGETS:
        if settings and config.kind == "network" and kv not in config.training:
            other = dataclasses.replace(settings, target=kv)
            words = Settings.command_line(other, "train", ("overwrite",))  # --target says the kind
            say_next(*shlex.split(words)[1:])
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
