"""Tuning of a memory: its plan (`kvalign.memory.plan`), by what streams lose.

    ... text ... The secret code of the red door is 48213 . ... text, 8 C ... The secret code of the
    red door is 48213 .

The stream is a text with codes in it; the digits that answer count together as `OF_CODES` of the
text. A model that was trained on facts (`kvalign.data_gen.facts`) is asked for facts instead. The
best way is kept that is better than the usual one by a 95 % interval of the paired difference, with
caches of each size. Of its layers the fewest are kept that are as good: each layer (of a deep
model a few neighbours) is left out alone, and then those together whose absence costs least, two
thirds of all at first, fewer until the rest is as good as all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.aligners import Aligner
from kvalign.cache.memory_sizes import ALL, layer_bias_of, usual_places
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
from kvalign.streaming.turns import Talk
from kvalign.training.settings import LARGE, SMALL, TuneMemorySettings

OF_CODES = 0.1
AS_GOOD, AT_WORST = 1.001, 1.01
"""Ratio to all layers up to which fewer are as good, and the upper end of its interval."""
AWAY, APART = 8, 150
"""Codes: asked for so many C after they were told, and so many tokens from one to the next."""
READ, REPLY = "I read this:\n\n", "I see."
MOST_GROUPS = 12
"""Layers are left out with their neighbours, in so many groups at most."""
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
    """One text for a cache of this size, with codes that are told and asked for; of a model with a
    chat template in turns of a conversation, which ask in other words than they tell.
    """
    tokenizer, rng = loaded.tokenizer, torch.Generator().manual_seed(SEED)
    plain = partial(ids_of, tokenizer=tokenizer, prefix=False, goes_on=True)
    text, turns = iter(ids), Talk(tokenizer) if tokenizer.chat_template else None
    codes: list[tuple[list[int], list[int]]] = []  # questions and codes
    parts: list[tuple[list[int], bool | None]] = []  # whether they answer; None: they do not count
    away = max(1, AWAY * size // APART)
    while piece := [*islice(text, APART)]:
        number = int(torch.randint(10_000, 100_000, (1,), generator=rng))
        code = f"The secret code of the {OWNERS[len(codes) % len(OWNERS)]} is"
        if turns is None:
            question, answer = plain(f"\n {code}"), plain(f" {number}")
            parts += [(piece, False), (question + answer, None)]
        else:
            told = turns.turn_ids(f"{code} {number}.", not codes)
            read = turns.turn_ids(READ + tokenizer.decode(piece), is_first=False)
            parts += [(told + plain(REPLY), None), (read + plain(REPLY), False)]
            question = turns.turn_ids(f"What is {code[0].lower()}{code[1:-3]}?", is_first=False)
            question, answer = question + plain(code), plain(f" {number}")
        codes.append((question, answer))
        for question, answer in codes[-away - 1 : -away]:
            parts += [(question, None), (answer, True)]
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


@dataclass(frozen=True)
class Way:
    """Plan, and what streams lose with it: a tensor for each cache size."""

    plan: RecallPlan
    losses: list[Tensor]


def measured(
    settings: TuneMemorySettings,
    method: str,
    loaded: LoadedModel,
    aligner: Aligner | None,
    streams: dict[int, WeighedStreams],
) -> RecallPlan:
    """Return the best plan, with what the command measured of each."""
    spec = loaded.spec

    def losses_of(sizes: dict[str, Any]) -> list[Tensor]:
        progress.phase(" ".join(map(str, sizes.values())) or "no memory")
        how: dict[str, Any] = {"aligner": aligner, "warn": False, **sizes}
        how |= {"memory": settings.memory} if sizes else {}
        methods = {
            size: make_method(method, loaded.model, cache_size=size, **how) for size in streams
        }
        return weighted(methods, streams)

    def way(plan: RecallPlan) -> Way:
        rows.append(_row(plan.sizes, losses := losses_of(plan.sizes), none, usual.losses))
        return Way(plan, losses)

    plan = RecallPlan(
        base_model=spec.name,
        embedding_fingerprint=embedding_fingerprint(loaded.model),
        recall_places=usual_places(spec.family),
    )
    others = [] if settings.quick else other_plans(plan, spec.attention, settings.layers or ())
    num_ids = sum(x.ids.numel() for x in streams.values())
    progress.expect((2 + len(others)) * num_ids, "tokens computed")
    usual, none = Way(plan, losses_of(plan.sizes)), losses_of({})  # what takes no memory is refused
    rows = [
        _row({}, none, none, usual.losses),
        _row(plan.sizes, usual.losses, none, usual.losses),
    ]
    ways = [usual, *(x for x in map(way, others) if is_below(1.0, x, usual))]
    best = min(ways, key=lambda x: _ratio(torch.cat(x.losses)))
    if not settings.quick:
        best = with_fewest_layers(best, spec.attention, way, num_ids)
    # The best was chosen by this text, the usual way was not.
    helps = is_below(1.0, usual, Way(plan, none))
    command = settings.command_line("tune-memory", leave_out=("out",))
    found = {"helps": helps, "measured": {"command": command, "rows": rows}}
    return best.plan.model_copy(update=found)


def other_plans(usual: RecallPlan, layers: Sequence[int], asked: Sequence[str]) -> list[RecallPlan]:
    """Plans that are compared with the usual one, all of them with all layers but those `asked`."""
    lower = layers[: len(layers) // 2]
    by_ear = [{x: -2.0 if x in lower else 0.0 for x in layers}]
    by_ear += [dict.fromkeys(layers, layer_bias) for layer_bias in (-0.5, 0.5)]
    ways = [{"recall_layers": x} for x in (*map(named, by_ear), *asked)]
    other = "rank" if usual.recall_places == "age" else "age"
    return [usual.model_copy(update=x) for x in (*ways, {"recall_places": other})]


def with_fewest_layers(
    best: Way, layers: Sequence[int], measure: Callable[[RecallPlan], Way], num_ids: int
) -> Way:
    """Return a way with fewer layers that is as good as the best, or that."""
    name = best.plan.recall_layers
    layer_bias = layer_bias_of(None if name == ALL else name, layers)

    def without(left_out: Sequence[int]) -> Way:
        kept = {x: bias for x, bias in layer_bias.items() if x not in left_out}
        return measure(best.plan.model_copy(update={"recall_layers": named(kept)}))

    each, names = ceil(len(layer_bias) / MOST_GROUPS), [*layer_bias]
    groups = [names[i : i + each] for i in range(0, len(names), each)]
    if len(groups) < 2:
        return best
    progress.expect(len(groups) * num_ids, "tokens computed")
    alone = [(without(group), group) for group in groups]
    alone.sort(key=lambda x: _ratio(torch.cat(x[0].losses)))
    num = 2 * len(groups) // 3
    while num:
        fewer = alone[0][0]
        if num > 1:
            progress.expect(num_ids, "tokens computed")
            fewer = without([layer for _, group in alone[:num] for layer in group])
        ratio, *_ = _ratios(fewer.losses, best.losses)
        if ratio <= AS_GOOD and is_below(AT_WORST, fewer, best):
            return fewer
        num = 3 * num // 4
    return best


def is_below(most: float, one: Way, other: Way) -> bool:
    """Return whether the interval of the ratio of their perplexities is, and no size's ratio is
    above it.
    """
    *_, high = _ratios(one.losses, other.losses)
    return high is not None and high < most and max(_by_size(one.losses, other.losses)) <= most


def named(layer_bias: Mapping[int, float]) -> str:
    """Name layers as `recall_layers` does."""
    runs = list[tuple[int, int, float]]()
    for layer, bias in layer_bias.items():
        first = layer
        if runs and runs[-1][1:] == (layer - 1, bias):
            first = runs.pop()[0]
        runs.append((first, layer, bias))
    parts = [
        (f"{x}" if x == y else f"{x}-{y}", f":{bias:g}" if bias else "") for x, y, bias in runs
    ]
    return ",".join(map("".join, parts))


def weighted(methods: dict[int, Method], streams: dict[int, WeighedStreams]) -> list[Tensor]:
    """Losses in nats of the labels that count, times their weights, for each cache size."""
    parts = []
    for size, method in methods.items():
        losses = score(method, streams[size].ids, lambda num: progress.advance(num)).cpu()
        check_losses(losses, method)
        weights = streams[size].weights
        parts.append((losses * weights)[weights > 0])
    return parts


def _row(
    sizes: dict[str, Any], losses: list[Tensor], none: list[Tensor], usual: list[Tensor]
) -> dict[str, Any]:
    row: dict[str, Any] = {"recall_places": None, "recall_layers": None} | sizes
    for name, others in {"by_none": none, "by_usual": usual}.items():
        ratio, low, high = _ratios(losses, others)
        row |= {name: ratio, f"{name}_low": low, f"{name}_high": high}
    return row | {"by_size": _by_size(losses, usual)}


def _ratios(losses: list[Tensor], others: list[Tensor]) -> tuple[float, float | None, float | None]:
    """Ratio of perplexities, paired, and its 95 % interval."""
    differences = torch.cat(losses) - torch.cat(others)
    return _ratio(differences), *interval(differences)


def _by_size(losses: list[Tensor], others: list[Tensor]) -> list[float]:
    return [_ratio(one - other) for one, other in zip(losses, others, strict=True)]


def _ratio(differences: Tensor) -> float:
    return differences.double().mean().exp().item()
