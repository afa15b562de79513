"""Choice of the method that fits a model, and of its aligner; obstacles to others."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel

from kvalign import checkpoints
from kvalign.aligners import Aligner, AlignerConfig
from kvalign.aligners.base import CONFIG
from kvalign.aligners.kinds import note_of_use
from kvalign.cache.sizes import OF_POLICY
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_checked
from kvalign.foundation.folders import newest_first
from kvalign.foundation.progress import warn_once
from kvalign.methods.base import Method
from kvalign.methods.registry import AUTO, METHODS
from kvalign.models.architectures import spec_of
from kvalign.models.identity import has_fingerprint


class Choice(NamedTuple):
    """Chosen method for a model, and its aligner.

    Attributes:
        method: key of `METHODS`.
        aligner: the given one, or where it was found; None: the method needs none, or none is here.
        why: reason for the method, in words; empty if it was named.
        note: what became of an aligner that was trained here, in words.
        num_sinks: those that the method was measured with; None: its default.
        num_labels: of the measurement that `why` tells; None: not known, or none.
    """

    method: str
    aligner: Aligner | str | Path | None = None
    why: str = ""
    note: str = ""
    num_sinks: int | None = None
    num_labels: int | None = None


def choose(
    model: PreTrainedModel,
    method: str = AUTO,
    *,
    cache_size: int | None = None,
    aligner: Aligner | str | Path | None = None,
    cached: bool = False,
) -> Choice:
    """Choose the method and the aligner of a stream.

    `kvalign` by name takes the aligner that is given; else the one that was trained here last and
    changes something; else the one that ships for the model. `auto` takes a given one; else the
    shipped one; else one that was trained here and judged by streams. It is `kvalign` with these,
    if the shipped one fits caches of this size (None: of any size), and if it was not measured as
    worse than `discard-half` there (`AlignerConfig.verdict_at`). Otherwise it is the method that
    keeps entries right without an aligner: `streaming-llm` on rotary and ALiBi positions,
    `discard-half` on learned ones. If `cached`, for what needs entries that stay (`needs_cache`), a
    measurement is only told.
    """
    is_auto = method == AUTO
    with_aligner = "kvalign" if is_auto else method
    if not METHODS[with_aligner].takes_aligner:
        return Choice(method, aligner)
    if aligner is not None:
        label = aligner.label if isinstance(aligner, Aligner) else aligner
        return Choice(with_aligner, aligner, f"with the aligner {label}" if is_auto else "")
    spec, shipped, note = spec_of(model.config), _shipped(model), ""
    merit: Merit = "judged" if is_auto else "used" if shipped else "any"
    trained = trained_here(model, at_least=merit)
    if trained and shipped is None:
        choice = Choice(with_aligner, trained, note=note_of_use(trained, spec.name))
        return _as_judged(choice, model, cache_size, cached) if is_auto else choice
    if trained and not is_auto:
        figures = in_figures(trained) or f"not compared with the shipped {shipped}"
        note = f"using {trained}, trained here: {figures}; --aligner {shipped} uses the shipped one"
        return Choice(method, trained, note=note)
    if not is_auto:
        return Choice(method, shipped)
    if trained:
        instead = f"uses it instead of the shipped {shipped}"
        note = f"{trained} was trained here: --aligner {trained} {instead}"
    elif other := trained_here(model):
        note = f"{other}, trained here, was never judged by streams and is not used: "
        note += "--method kvalign uses it"
    lack, todo = (
        lack_of_aligner(model, cache_size),
        f": {how_to_train(model, cache_size)} makes one",
    )
    if not lack:
        why = f"with {shipped}, which ships for {spec.name}"
        return _as_judged(Choice(with_aligner, shipped, why, note), model, cache_size, cached)
    if spec.family != "learned":
        return Choice("streaming-llm", None, f"{spec.family} positions need no aligner", note)
    if not shipped and (useless := trained_here(model, at_least="any")) and not note:
        lack, todo = f"{useless}, trained here, helps no stream", ""
    return Choice("discard-half", None, f"learned positions, and {lack}{todo}", note)


def _as_judged(
    choice: Choice, model: PreTrainedModel, cache_size: int | None, cached: bool
) -> Choice:
    """The choice of an aligner; `discard-half` where the aligner was measured as worse."""
    config = _config(checkpoints.aligner_path(str(choice.aligner)) or Path(str(choice.aligner)))
    if cache_size is None:
        from kvalign.cache.default_size import default_size

        cache_size, _ = default_size(model, longest=config.largest_cache)
    verdict = config.verdict_at(cache_size)
    if config.family != "learned" or verdict is None or not verdict.is_worse:
        return choice._replace(num_labels=config.num_judged if verdict else None)
    why = f"on held-out text {choice.aligner} has a ratio to discard-half of {verdict}"
    if cached:
        return choice._replace(why=f"{why}, but discard-half keeps no such cache")
    num_sinks, num_labels = config.num_sinks, config.num_judged
    return Choice("discard-half", None, why, num_sinks=num_sinks, num_labels=num_labels)


def needs_cache(sizes: Mapping[str, Any]) -> bool:
    """Return whether sizes are asked for that only entries in a cache have, such as a memory."""
    return any(sizes.get(name) for name in ("realign_every", *OF_POLICY))


def aligners_at_hand(model: PreTrainedModel, *, at_least: Merit = "used") -> list[str]:
    """Shipped aligners of a model, the default first, and the one of `trained_here`."""
    prefix = f"kvalign-{spec_of(model.config).name}-"
    others = (one for one in checkpoints.ALIGNERS if one.startswith(prefix))
    names = (_shipped(model), *others, trained_here(model, at_least=at_least))
    return list(dict.fromkeys(str(one) for one in names if one))


def obstacles(model: PreTrainedModel, *, cache_size: int | None = None) -> dict[str, str]:
    """Methods that cannot be used on a model, with reasons; arguments as of `choose`."""
    lack = lack_of_aligner(model, cache_size)
    return {name: lack for name, cls in METHODS.items() if cls.takes_aligner and lack}


def lack_of_aligner(model: PreTrainedModel, cache_size: int | None = None) -> str:
    """Reason why no shipped aligner fits caches of this size of a model; empty if one does."""
    shipped, name = _shipped(model), spec_of(model.config).name or "this model"
    if shipped is None:
        return f"no aligner ships for {name}"
    longest = _config(checkpoints.FOLDER / shipped).largest_cache
    if cache_size is not None and cache_size > longest:
        return f"{shipped} is for at most {longest} entries"
    return ""


def how_to_train(model: PreTrainedModel, cache_size: int | None = None) -> str:
    """Command that trains an aligner of a model, for caches of this size."""
    command = f"kvalign train --model {shlex.quote(spec_of(model.config).name or 'NAME')}"
    return f"{command} --chunk-len {cache_size + 1}" if cache_size and _shipped(model) else command


Merit = Literal["any", "used", "judged"]


def trained_here(model: PreTrainedModel, *, at_least: Merit = "used") -> Path | None:
    """Folder of the aligner that was trained last for a model, in the model's folder
    (`kvalign.foundation.folders`) below the one in which the program runs; None if there is none.

    Args:
        model: the model itself: one of the same name with another embedding does not count.
        at_least: ignore aligners that did not help and were saved without effect (`used`), or also
            those that were never judged by streams, as networks may be (`judged`).
    """
    name = model.config.name_or_path
    for path in newest_first(name, CONFIG) if name else ():
        try:
            config = _config(path.parent)
        except UserError:  # a recording's, or another program's
            continue
        parts = [part for part in config.training.values() if isinstance(part, dict)]
        useful = [part for part in parts if part.get("used", True)]
        judged = any("judged" in part for part in useful)
        merits = {"any": True, "used": bool(useful), "judged": judged}
        if merits[at_least] and has_fingerprint(model, config.embedding_fingerprint):
            return path.parent
    return None


def in_figures(folder: Path) -> str:
    """Return the figures of an aligner that was trained here, beside those of the shipped one, in
    words; empty if it was never judged by streams.
    """
    for part in _config(folder).training.values():
        try:  # what a config says of training is informative
            words = f"perplexity {math.exp(part['judged']['val_nll']):.4g} of held-out text"
            if one := part["judged"].get("shipped"):
                words += f", {math.exp(one['val_nll']):.4g} with the shipped {one['aligner']}"
            return words
        except (TypeError, KeyError, AttributeError, OverflowError):
            continue
    return ""


def warn_if_stale(method: Method) -> None:
    """Log, once for a method and a model, that kept entries are wrong at their new positions."""
    if method.goes_stale:
        better = choose(method.model, cache_size=method.sizes.cache_size).method
        warn_once(
            f"{method.name}: {method.spec.name or 'this model'} has learned positions, so kept "
            f"entries become stale at each eviction, and the text degrades; auto uses {better}"
        )


def warn_if_too_long(method: Method, num_tokens: int) -> None:
    """Log, once for a size, that an input of so many tokens is longer than the cache."""
    if method.warns and (num := method.num_forgotten(num_tokens)):
        warn_once(
            f"{num} of the input's {num_tokens} tokens do not fit in the cache of "
            f"{method.sizes.cache_size} and are forgotten: a larger cache keeps more"
        )


def _shipped(model: PreTrainedModel) -> str | None:
    return checkpoints.default_aligner(model.config.name_or_path)


def _config(folder: Path) -> AlignerConfig:
    return read_checked(AlignerConfig, folder / CONFIG)
