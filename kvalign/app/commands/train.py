"""Commands that train aligners and small models, and judge, tune, import or record for that."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalign import training
from kvalign.aligners.kinds import KINDS, TARGETS
from kvalign.app.cli.next_steps import of_model, say_generate, say_next, say_written
from kvalign.data_gen.settings import RecordSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import Settings, settings_of
from kvalign.training.kinds import TRAINERS
from kvalign.training.pretraining_settings import PretrainSettings
from kvalign.training.settings import (
    ImportPublishedSettings,
    JudgeSettings,
    TrainSettings,
    TuneMemorySettings,
    TuneSettings,
)

OF_NETWORKS = {"--target", "--data"}
"""Flags that mean a network if no kind is named."""


def kind_and_flags(args: Sequence[str]) -> tuple[str, list[str]]:
    """The kind, which may be left out, and its flags; UserError for a flag of other kinds."""
    kind, flags = args[0] if args else "", [*args[1:]]
    names = {word.partition("=")[0].replace("--no-", "--") for word in args if word[:2] == "--"}
    if kind[:1] in ("", "-"):
        kind, flags = "network" if names & OF_NETWORKS else "table", [*args]
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


def train(settings: TrainSettings, as_json: bool) -> dict[str, Any]:
    kind = settings.aligner_kind
    results = TRAINERS[kind](settings)
    if as_json:
        return results
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
    """Name the other network if one is left to train, and `generate` with what did better."""
    from kvalign.aligners import AlignerConfig
    from kvalign.aligners.base import CONFIG
    from kvalign.foundation.files import read_checked

    config = read_checked(AlignerConfig, out / CONFIG)
    for kv in TARGETS:
        if settings and config.kind == "network" and kv not in config.training:
            other = dataclasses.replace(settings, target=kv)
            words = Settings.command_line(other, "train", ("overwrite",))  # --target says the kind
            say_next(*shlex.split(words)[1:])
    model, verdicts = of_model(config.base_model), config.verdicts
    if not any(part["used"] for part in config.training.values()):
        say_next("generate", *model)
    elif verdicts and config.family == "learned" and (worse := config.sizes_of_discard_half()):
        better = [one.cache_size for one in verdicts if one.cache_size not in worse]
        sizes = f" at C = {', '.join(map(str, worse))}, which did better" if better else ""
        why = sizes or ": the aligner is better at no size, by the 95 % interval"
        print(f"--method auto takes discard-half{why}", file=sys.stderr)
        if better:
            say_generate(config.base_model, out, "--cache-size", str(better[-1]))
        else:
            say_next("generate", "--method", "discard-half", *model)
    else:
        say_generate(config.base_model, out)


def verdict_lines(judged: dict[str, Any]) -> list[str]:
    """Return the result of `kvalign.training.judge.judge` in words. It compares streams with equal
    sinks, so that they differ only in the aligner: those of the choice, or, if nothing is used, of
    the best that was tried.
    """
    from kvalign.aligners.base import Verdict  # torch

    tried, own_sinks = judged["tried"], judged["num_sinks"]
    num_sinks = tried["num_sinks"]
    figures = f"{math.exp(tried['val_nll']):.4g} with "
    figures += " and ".join(f"{kv}s" for kv in tried["parts"]) + " realigned"
    without = judged["without"]["val_nll"]
    lines = [
        f"perplexity of {judged['num_labels']} held-out tokens, streamed with caches of "
        f"{', '.join(map(str, judged['cache_sizes']))} and {num_sinks} sinks: "
        f"{math.exp(without):.4g} with streaming-llm, {math.exp(judged['discard_half']):.4g} "
        f"with discard-half{f' of {own_sinks} sinks' * (own_sinks != num_sinks)}"
    ]
    if not judged["parts"]:
        is_lower = tried["val_nll"] < without
        why = "is not distinguishable from streaming-llm" if is_lower else "is no better"
        nothing = f"changes nothing and equals streaming-llm with {own_sinks} sinks"
        return [*lines, f"not used: {figures} {why}; the saved aligner {nothing}"]
    verdicts = [Verdict(**one) for one in judged["against_discard_half"]]
    relative = f"; relative to discard-half {', '.join(map(str, verdicts))}" if verdicts else ""
    lines.append(f"used: {figures}{relative}")
    return lines


def judge(settings: JudgeSettings, as_json: bool) -> dict[str, Any]:
    judged = training.judge_aligner(settings)
    if not as_json:
        print(*verdict_lines(judged), f"aligner: {settings.out}", sep="\n")
        say_use_of(settings.out)
    return judged


_DIGITS = {"lr": "{:.3g}", "val_loss": "{:.6g}", "seconds": "{:.1f}"}


def tune(settings: TuneSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.foundation.console import Heading, print_table

    result = training.tune_network(settings)
    if as_json:
        return result
    best, val_loss = result["best"], result["aligner_val_loss"]
    use = "" if result["used"] else "; not used: entries stay unchanged"
    print(
        f"{result['aligner']}: val loss {val_loss:.6g}, trained again from trial {best['trial']}, "
        f"which had {best['val_loss']:.6g} (ratio {val_loss / best['val_loss']:.4f}); input-label "
        f"MSE {result['input_label_mse']:.6g}{use}"
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


def tune_memory(settings: TuneMemorySettings, as_json: bool) -> dict[str, Any]:
    from kvalign.foundation.console import Heading, print_table

    result = training.tune_memory(settings)
    if as_json:
        return result
    names = ("places", "layers", "relative to no memory", "relative to the usual way")
    print_table(
        [Heading(name, is_number=i > 1) for i, name in enumerate(names)],
        [
            [
                row["recall_places"] or "no memory",
                row["recall_layers"] or "",
                _ratio(row, "by_none"),
                _ratio(row, "by_usual"),
            ]
            for row in result["rows"]
        ],
    )
    plan = result["plan"]
    print(
        f"layers {plan['recall_layers']} take entries back, by {plan['recall_places']}: "
        f"{result['file']}"
    )
    return result


def _ratio(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3f}" + ("" if high is None else f" ({low:.3f} to {high:.3f})")


def import_published(settings: ImportPublishedSettings, as_json: bool) -> dict[str, Any]:
    config = training.import_published(settings)
    if not as_json:
        print(f"{settings.out}: the authors' networks for {config.base_model}")
        say_generate(config.base_model, settings.out)
    return {"out": str(settings.out), "sizes": config.sizes}


def pretrain(settings: PretrainSettings, as_json: bool) -> dict[str, Any]:
    figures = training.pretrain(settings)
    if not as_json:
        print(json.dumps(figures))  # all that there is to say
        say_written(settings.out)
        if settings.arch == "gpt2" or settings.is_recall:
            corpus = ["--corpus", "recall"] if settings.is_recall else []
            say_next("train", "table", "--model", settings.out, *corpus)
        else:
            say_next("generate", "--method", "streaming-llm", "--model", settings.out)
    return figures


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
