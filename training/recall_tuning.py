"""Tuning of a memory: its plan (`kvalign.memory.plan`), by what streams lose.

    ... text ... The secret code of the red door is 48213 . ... text, 8 C ... The secret code of the
    red door is 48213 .

The stream is a text with codes in it; the digits that answer count together as `OF_CODES` of the
text. A model that was trained on facts (`kvalign.data_gen.facts`) is asked for facts instead. The
best way is kept that is better than the usual one by a 95 % interval of the paired difference, with
caches of each size; if there is none, the upper half of the layers, which is faster, if it is as
good.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.aligners import Aligner
from kvalign.cache.memory_sizes import layer_bias_of, usual_places
from kvalign.data_gen import facts
from kvalign.data_gen.corpora import first_ids
from kvalign.data_gen.corpus import OWNERS
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_json
from kvalign.foundation.settings import keywords_of
from kvalign.foundation.statistics import interval
from kvalign.memory.plan import FILE, RecallPlan, folder_of, in_cache
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import choose
from kvalign.methods.registry import METHODS
from kvalign.models.identity import embedding_fingerprint
from kvalign.models.input_ids import ids_of
from kvalign.models.loading import LoadedModel, load_model
from kvalign.streaming.scoring import check_losses, score
from kvalign.training.settings import LARGE, SMALL, TuneMemorySettings

OF_CODES = 0.1
AS_GOOD = 1.003
"""Upper end of the interval of a ratio to all layers, below which their upper half is as good."""
AWAY, APART = 8, 150
"""Codes: asked for so many C after they were told, and so many tokens from one to the next."""
FARTHEST, NUM_STREAMS, SEED = 16, 4, 20
"""Facts: how many C old, in so many streams, of a seed that no evaluation has by default."""


@dataclass(frozen=True)
class WeighedStreams:
    """Streams for a cache: ids [B, N], and how much each label counts, [labels] float32 (0: not at
    all).
    """

    ids: Tensor
    weights: Tensor


@keywords_of(TuneMemorySettings)
@progress.shown_as("tune-memory")
def tune_memory(
    settings: TuneMemorySettings, *, loaded: LoadedModel | None = None
) -> dict[str, Any]:
    """Measure the plan of a model and write it.

    Returns:
        `file`; `plan`, as it is written; `rows`: each way that was measured, with the ratio of its
        perplexity to that without a memory and to that of the model's family by default, with 95 %
        intervals.

    Raises:
        UserError: a method or model that takes no memory; a text that is too short.
    """
    if loaded is None:
        loaded = load_model(settings.model, settings.device, weights=settings.weights)
    longest = loaded.spec.context_len
    choice = choose(loaded.model, settings.method, aligner=settings.aligner, cached=True)
    kind, aligner = METHODS[choice.method], None
    if "memory" in kind.ignored_settings():
        raise UserError(
            f"{choice.method} takes no memory, {choice.why or 'so there is nothing to measure'}: "
            "name a --method or an --aligner"
        )
    if kind.takes_aligner and choice.aligner is not None:
        one = choice.aligner
        aligner = one if isinstance(one, Aligner) else Aligner.from_pretrained(one)
        longest = aligner.config.chunk_len
    sizes = settings.cache_sizes or usual_sizes(longest)[: 1 if settings.quick else 2]
    if facts.are_words_of(loaded.tokenizer):
        streams = {size: fact_streams(size, settings.num_questions, loaded) for size in sizes}
    else:
        text = first_ids(settings.corpus, loaded.tokenizer, settings.num_tokens, "--num-tokens")
        streams = {size: text_with_codes(size, text, loaded) for size in sizes}
    for one in settings.layers or ():
        layer_bias_of(one, loaded.spec.attention)
    plan = measured(settings, choice.method, loaded, aligner, streams)
    file = settings.out or default_file(loaded.spec.name, aligner)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, written := plan.model_dump(mode="json"))
    return {"file": str(file), "plan": written, "rows": written["measured"]["rows"]}


def default_file(model: str, aligner: Aligner | None) -> Path:
    folder = None if aligner is None else folder_of(aligner)
    if folder is None and not model:
        raise UserError("a model without a name has no place for its plan: give --out")
    return in_cache(model) if folder is None else folder / FILE


def usual_sizes(longest: int | None) -> tuple[int, ...]:
    longest = longest or 8 * LARGE
    return tuple(sorted({min(SMALL, longest // 8), min(LARGE, longest // 2)}))


def text_with_codes(size: int, ids: Sequence[int], loaded: LoadedModel) -> WeighedStreams:
    """One text for a cache of this size, with codes that are told and asked for."""
    tokenizer, rng = loaded.tokenizer, torch.Generator().manual_seed(SEED)
    text = iter(ids)
    codes: list[tuple[list[int], list[int]]] = []  # questions and codes
    parts: list[tuple[list[int], bool | None]] = []  # whether they answer; None: they do not count
    away = max(1, AWAY * size // APART)
    while piece := [*islice(text, APART)]:
        number = int(torch.randint(10_000, 100_000, (1,), generator=rng))
        words = (
            f"\n The secret code of the {OWNERS[len(codes) % len(OWNERS)]} is",
            f" {number}",
        )
        question, code = (ids_of(x, tokenizer, prefix=False, goes_on=True) for x in words)
        codes.append((question, code))
        parts += [(piece, False), (question + code, None)]
        for question, code in codes[-away - 1 : -away]:
            parts += [(question, None), (code, True)]
    stream = [token for ids, _ in parts for token in ids]
    kinds = [kind for ids, kind in parts for _ in ids][size + 1 :]
    num_text, num_code = kinds.count(False), kinds.count(True)
    if not num_text or not num_code:
        raise UserError(f"the text is too short for {AWAY} times {size} tokens: raise --num-tokens")
    weight = {None: 0.0, False: 1.0, True: OF_CODES * num_text / num_code}
    weights = torch.tensor([weight[kind] for kind in kinds])
    return WeighedStreams(torch.tensor([stream], device=loaded.model.device), weights)


def fact_streams(size: int, num_questions: int, loaded: LoadedModel) -> WeighedStreams:
    """Streams of facts, of which equally many answers count of each age."""
    ids, ages = facts.asked_streams(
        size, num_questions=num_questions, farthest=FARTHEST, num_streams=NUM_STREAMS, seed=SEED
    )
    weights = torch.from_numpy(ages.flatten() > 0).float()
    return WeighedStreams(torch.from_numpy(ids).to(loaded.model.device), weights)


def measured(
    settings: TuneMemorySettings,
    method: str,
    loaded: LoadedModel,
    aligner: Aligner | None,
    streams: dict[int, WeighedStreams],
) -> RecallPlan:
    """Return the best plan, with what the command measured of each."""
    spec = loaded.spec
    usual = RecallPlan(
        base_model=spec.name,
        embedding_fingerprint=embedding_fingerprint(loaded.model),
        recall_places=usual_places(spec.family),
    )
    of_all, half = spec.attention, len(spec.attention) // 2
    upper, quieter = named(of_all[half:]), named(of_all[:half], ":-2")
    by_ear = f"{quieter},{upper}", named(of_all, ":-0.5"), named(of_all, ":0.5")
    ways = [
        usual.model_copy(update={"recall_layers": x})
        for x in (upper, *by_ear, *(settings.layers or ()))
    ]
    other = "rank" if usual.recall_places == "age" else "age"
    ways.append(usual.model_copy(update={"recall_places": other}))
    ways = [] if settings.quick else ways
    progress.expect(
        (2 + len(ways)) * sum(x.ids.numel() for x in streams.values()), "tokens computed"
    )

    def losses(plan: RecallPlan | None) -> list[Tensor]:
        progress.phase("no memory" if plan is None else " ".join(map(str, plan.sizes.values())))
        sizes = {} if plan is None else {"memory": settings.memory, **plan.sizes}
        how: dict[str, Any] = {"aligner": aligner, "warn": False, **sizes}
        methods = {
            size: make_method(method, loaded.model, cache_size=size, **how) for size in streams
        }
        return weighted(methods, streams)

    of_usual, none = losses(usual), losses(None)  # what takes no memory is refused first
    rows = [_row(None, none, none, of_usual), _row(usual, of_usual, none, of_usual)]
    best = rows[1]
    for way in ways:
        rows.append(row := _row(way, losses(way), none, of_usual))
        if _is_below(row, 1.0) and row["by_usual"] < best["by_usual"]:
            best = row
    if best is rows[1] and ways and _is_below(rows[2], AS_GOOD):
        best = rows[2]
    kept = {name: best[name] for name in usual.sizes} | {"helps": helps(best)}
    command = settings.command_line("tune-memory", leave_out=("out",))
    return usual.model_copy(update=kept | {"measured": {"command": command, "rows": rows}})


def helps(row: dict[str, Any]) -> bool:
    """Return whether the interval of a way's ratio to no memory lies below 1."""
    return row["by_none_high"] is not None and row["by_none_high"] < 1


def named(layers: Sequence[int], layer_bias: str = "") -> str:
    """Name layers as `recall_layers` does, all with one bias."""
    is_range = layers[-1] - layers[0] == len(layers) - 1 > 0
    names = [f"{layers[0]}-{layers[-1]}"] if is_range else [*map(str, layers)]
    return ",".join(f"{name}{layer_bias}" for name in names)


def weighted(methods: dict[int, Method], streams: dict[int, WeighedStreams]) -> list[Tensor]:
    """Losses in nats of the labels that count, times their weights, for each cache size."""
    parts = []
    for size, method in methods.items():
        losses = score(method, streams[size].ids, lambda num: progress.advance(num)).cpu()
        check_losses(losses, method)
        weights = streams[size].weights
        parts.append((losses * weights)[weights > 0])
    return parts


def _is_below(row: dict[str, Any], most: float) -> bool:
    """Return whether the interval of a way's ratio to the usual one is, and no size's ratio is
    above it.
    """
    high = row["by_usual_high"]
    return high is not None and high < most and max(row["by_size"]) <= most


def _row(
    plan: RecallPlan | None, losses: list[Tensor], none: list[Tensor], usual: list[Tensor]
) -> dict[str, Any]:

    row: dict[str, Any] = {"recall_places": None, "recall_layers": None}
    row |= plan.sizes if plan is not None else {}
    for name, others in {"by_none": none, "by_usual": usual}.items():
        parts = [one - other for one, other in zip(losses, others, strict=True)]
        low, high = interval(differences := torch.cat(parts))
        row |= {name: _ratio(differences), f"{name}_low": low, f"{name}_high": high}
    return row | {"by_size": [_ratio(part) for part in parts]}


def _ratio(differences: Tensor) -> float:
    return differences.double().mean().exp().item()
