"""Model and methods of a comparison: every requested method, at every size."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.aligners.kinds import note_of_use
from kvalign.cache.sizes import OF_MEMORY
from kvalign.data_gen.corpora import first_ids
from kvalign.eval.protocol import ComparisonSettings
from kvalign.eval.protocol.data import OF_POLICY, Row
from kvalign.eval.protocol.tables import method_name, names_of
from kvalign.foundation import progress
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import Merit, aligners_at_hand, choose, how_to_train, obstacles
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import spec_of
from kvalign.models.identity import identity
from kvalign.models.input_ids import prefix_ids, with_prefix
from kvalign.models.loading import LoadedModel, load_model
from kvalign.models.packed import weights_of
from kvalign.policies import OLDEST

_INFORMATIVE = ("_name_or_path", "transformers_version")  # in a model's config

S = TypeVar("S", bound=ComparisonSettings)


def load(settings: S, loaded: LoadedModel | None) -> tuple[S, LoadedModel]:
    """Settings and the model that they name; or a loaded model, and the settings with its name."""
    _check_sizes(settings)
    if loaded is None:
        loaded = load_model(settings.model, settings.device, weights=settings.weights)
        return settings, loaded
    name, device = loaded.spec.name, str(loaded.model.device)
    named = dict[str, Any](model=name, device=device, weights=weights_of(loaded.model))
    return dataclasses.replace(settings, **named), loaded


def read_texts(loaded: LoadedModel, corpus: str, shape: tuple[int, int], smaller: str) -> Tensor:
    """First tokens of a corpus's test part, in rows: [B, T] int64. The tokenizer's opening tokens,
    such as a sink token, replace the first ones of each row, so that models with and without them
    have the same labels.

    Raises:
        UserError: the corpus has fewer; it says to give `smaller` flags.
    """
    progress.phase(f"reading {corpus}")
    ids = first_ids(corpus, loaded.tokenizer, shape[0] * shape[1], smaller)
    texts = torch.tensor(ids, device=loaded.model.device).view(shape)
    return with_prefix(texts, prefix_ids(loaded.tokenizer))


def chosen_by_auto(settings: ComparisonSettings, model: PreTrainedModel) -> list[Row]:
    """Method that `auto` takes at each cache size, why, and by how many labels."""
    choices = {size: choose(model, cache_size=size) for size in settings.cache_sizes}
    names = ("method", "why", "num_labels")
    return [
        {"cache_size": size, **{name: getattr(choice, name) for name in names}}
        for size, choice in choices.items()
    ]


def _check_sizes(settings: ComparisonSettings) -> None:
    """Raise UserError for sizes that do not fit, as far as neither model nor aligner says them."""
    sinks, evicted = settings.num_sinks or (None,), settings.num_evicted or (None,)
    for name, num_sinks, num_evicted in product(settings.methods, sinks, evicted):
        cls, numbers = METHODS[name], {"num_sinks": num_sinks, "num_evicted": num_evicted}
        free: dict[str, Any] = {size: x for size, x in numbers.items() if size not in cls.fixed}
        for cache_size in () if cls.takes_aligner else settings.cache_sizes:
            cls.sizes_for(cache_size, **free)


def make_grid(
    settings: ComparisonSettings, model: PreTrainedModel, aligners: Sequence[Aligner] | None = None
) -> list[Method]:
    """Each method once at every cache size, number of sinks and number evicted, with every policy;
    `kvalign` once for each aligner: the given ones, or else those that the settings name, the
    shipped one, or the one trained here. Without any, the default methods are those that need none.
    All have equal sinks (`_num_sinks`), as far as they can have any.

    Raises:
        UserError: as `kvalign.make_method`.
    """
    exclusions = set[tuple[str, int]]()
    if not aligners:
        names = aligners_of(settings, model)
        if not settings.aligner and {*names} <= {*checkpoints.ALIGNERS}:
            exclusions = _exclusions(settings, model)
        aligners = [Aligner.from_pretrained(name) for name in names]
    methods = [
        make_method(
            name,
            model,
            cache_size=cache_size,
            num_sinks=None if "num_sinks" in METHODS[name].fixed else num_sinks,
            num_evicted=num_evicted,
            realign_every=realign_every,
            aligner=aligner,
            warn=False,
            **which,
        )
        for cache_size in settings.cache_sizes
        for num_evicted in settings.num_evicted or (None,)
        for num_sinks in _num_sinks(settings, aligners, exclusions)
        for name in settings.methods
        if (name, cache_size) not in exclusions
        for aligner in ((aligners or (None,)) if METHODS[name].takes_aligner else (None,))
        for realign_every in (settings.realign_every if METHODS[name].takes_aligner else (None,))
        for which in _policies(settings, METHODS[name])
    ]
    # What was asked for twice is wanted once; so is `discard-half`, which evicts what it does at
    # any setting.
    methods = list({tuple(sizes_of(method).values()): method for method in methods}.values())
    for method, name in zip(methods, names_of(list(map(sizes_of, methods))), strict=True):
        method.aligner_name = name
    return methods


def _num_sinks(
    settings: ComparisonSettings, aligners: Sequence[Aligner], exclusions: set[tuple[str, int]]
) -> Sequence[int | None]:
    """Numbers of sinks of all methods: those that were asked for, or one: the most that an aligner
    has, with which `kvalign` streams, or without aligners the most that a method has by default.
    None, each method's own, is the paper's protocol.
    """
    if settings.num_sinks or settings.protocol == "paper":
        return settings.num_sinks or (None,)
    pairs = product(settings.methods, settings.cache_sizes)
    classes = [METHODS[name] for name, size in pairs if (name, size) not in exclusions]
    if aligners and any(cls.takes_aligner for cls in classes):
        return (max(aligner.config.num_sinks for aligner in aligners),)
    return (max(cls.default_num_sinks for cls in classes),)


def _policies(settings: ComparisonSettings, cls: type[Method]) -> list[dict[str, Any]]:
    """Settings of a method's evictions, positions and memory: each that was asked for, but for
    positions that leave an aligner nothing to do, unless they are all that was asked for.
    """
    if not cls.takes_policy:
        return [{}]
    moves = cls.takes_aligner and "compact" in settings.positions
    kinds = ("compact",) if moves else settings.positions
    evictions: list[dict[str, Any]] = [
        {
            "policy": policy,
            "num_recent": None if policy == OLDEST else recent,
            "positions": kind,
            "cache_dtype": dtype,
        }
        for dtype, kind, policy, recent in product(
            settings.cache_dtype, kinds, settings.policy, settings.num_recent or (None,)
        )
    ]
    how = {name: getattr(settings, name) for name in OF_MEMORY[2:]}
    return [
        which | ({"memory": memory, "num_recalled": num_recalled, **how} if memory else {})
        for memory, num_recalled in product(settings.memory, settings.num_recalled or (None,))
        for which in evictions
    ]


def aligners_of(settings: ComparisonSettings, model: PreTrainedModel) -> list[str]:
    """The aligners that the settings name, each once; else the one that ships, or that was trained
    here, for named methods even if it did not help. Empty if there is none, or no method takes any.
    """
    if not any(METHODS.find(name).takes_aligner for name in settings.methods):
        return []
    if settings.aligner:
        by_path: dict[Path, str] = {}
        for name in settings.aligner:
            by_path.setdefault((checkpoints.aligner_path(name) or Path(name)).resolve(), name)
        return [*by_path.values()]
    merit: Merit = "any" if "methods" in settings.changed() else "used"
    names = aligners_at_hand(model, at_least=merit)[:1]
    if names and names[0] not in checkpoints.ALIGNERS:
        progress.say(note_of_use(names[0], settings.model))
    return names


def _exclusions(settings: ComparisonSettings, model: PreTrainedModel) -> set[tuple[str, int]]:
    """Default methods that lack an aligner at which cache sizes, unless asked for."""
    if "methods" in settings.changed():
        return set()
    reference = getattr(settings, "reference", None)
    reasons = {
        (name, size): why
        for size in settings.cache_sizes
        for name, why in obstacles(model, cache_size=size).items()
        if name in settings.methods and name != reference
    }
    for name, why in dict.fromkeys((name, why) for (name, _), why in reasons.items()):
        if spec_of(model.config).family == "learned":
            todo = f"{how_to_train(model, max(settings.cache_sizes))} makes one"
        else:
            todo = "streaming-llm needs none here"
        progress.say(f"{name} is left out: {why} ({todo}; --aligner names one)")
    return set(reasons)


def sizes_of(method: Method) -> Row:
    """Return the fields that identify a method's row (`SIZES`)."""
    aligner: Aligner | None = getattr(method, "aligner", None)
    return {
        "method": method.name,
        "aligner": method.aligner_name,
        "aligner_label": aligner and aligner.label,
        "aligner_path": aligner and aligner.source,
        "aligner_revision": aligner and aligner.revision,
        "cache_size": method.sizes.cache_size,
        "num_sinks": method.sizes.num_sinks,
        "num_evicted": method.sizes.num_evicted,
        "realign_every": method.sizes.realign_every if aligner else None,
        **{x: getattr(method.sizes, x) if method.takes_policy else None for x in OF_POLICY},
        **{x: getattr(method.sizes, x) for x in OF_MEMORY[2:] if method.sizes.memory},
    }


def one_by_one(
    methods: Sequence[Method], num_each: int, units: str
) -> Iterator[tuple[Method, progress.Bar]]:
    """Each method, with the progress bar, which expects `num_each` units of work of it."""
    with progress.shown_as("eval") as bar:
        bar.expect(len(methods) * num_each, units)
        for method in methods:
            bar.phase(title_of(method))
            yield method, bar


def title_of(method: Method) -> str:
    return f"{method_name(sizes_of(method))} C={method.sizes.cache_size}"


def losses_key(method: Method, ids: Tensor, stepwise: bool) -> dict[str, Any]:
    """Return everything that the losses of `method` on ids [1, N] depend on."""
    aligner = getattr(method, "aligner", None)
    config = method.model.config.to_dict()
    config = {name: x for name, x in config.items() if name not in _INFORMATIVE}
    return {
        "method": method.name,
        "aligner": aligner and aligner.label,  # not its name, which depends on those beside it
        **dataclasses.asdict(method.sizes),
        "aligner_sha256": _digest(*aligner.state_dict().values()) if aligner else None,
        "model": identity(method.model),
        "config": config,
        "first_input_sha256": _digest(ids[:, : method.sizes.cache_size + 1]),
        "stepwise": stepwise,
    }


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
