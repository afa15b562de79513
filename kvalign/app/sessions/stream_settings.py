"""Settings of a method and of a stream of text, shared by the commands that stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvalign import checkpoints
from kvalign.cache.default_size import LARGEST_DEFAULT, OF_A_MINI
from kvalign.cache.sizes import OF_POLICY, CacheSizes, num_evicted_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import ModelSettings, Settings, flag, like, option
from kvalign.methods.registry import AUTO, check_name
from kvalign.streaming.sampling import MAX_NEW_TOKENS, Sampling, drawing

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.text_stream import TextStream

# Without those of Python and of evaluations, which the model's plan says elsewhere.
SIZES = ("num_evicted", "realign_every", *(x for x in OF_POLICY if not x.startswith("recall_")))


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """Base of the settings of commands that stream with a method."""

    method: str = option(
        AUTO, help="streaming method (kvalign list methods); auto: one that fits the model"
    )
    cache_size: int | None = option(
        None,
        help="entries the cache keeps, sinks included (default: as many as the context length "
        f"and a quarter of the free memory allow, at most {LARGEST_DEFAULT}; for a mini model "
        f"{OF_A_MINI})",
        at_least=1,
    )
    num_evicted: str | None = like(
        CacheSizes,
        "num_evicted",
        more="; or half, quarter, eighth of the window (default: 1; discard-half: half)",
    )
    realign_every: int | None = like(CacheSizes, "realign_every")
    policy: str | None = like(CacheSizes, "policy")
    num_recent: int | None = like(CacheSizes, "num_recent", at_least=0)
    positions: str | None = like(CacheSizes, "positions")
    cache_dtype: str | None = like(CacheSizes, "cache_dtype")
    memory: int | None = like(CacheSizes, "memory", more="")
    num_recalled: int | None = like(CacheSizes, "num_recalled", at_least=1)
    aligner: str | None = option(
        None,
        help="aligner of kvalign: folder, hub id or shipped name (default: for --method "
        "kvalign the newest in kvalign-data/MODEL, else the shipped one)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        num_evicted_of(self.num_evicted or 1, 2)

    def sizes(self) -> dict[str, Any]:
        """Return the flags' sizes, as arguments of `make_method`."""
        return {name: getattr(self, name) for name in SIZES}


@dataclass(frozen=True, kw_only=True)
class StreamSettings(MethodSettings, ModelSettings):
    """Base of the settings of commands that stream text: method, sizes and sampling."""

    weights: str = like(ModelSettings, "weights", "auto", more="")
    compile: bool | None = option(
        None,
        help="compile the step: the start is slow, steps are faster, and if possible the step is "
        "stored for later starts (default: take a stored one, see kvalign compile)",
    )
    max_new_tokens: int | None = like(
        Sampling, "max_new_tokens", more=f" (default: {MAX_NEW_TOKENS})"
    )
    do_sample: bool | None = like(Sampling, "do_sample", more="")
    temperature: float | None = like(Sampling, "temperature")
    top_k: int | None = like(Sampling, "top_k")
    top_p: float | None = like(Sampling, "top_p")
    min_p: float | None = like(Sampling, "min_p")
    repetition_penalty: float | None = like(Sampling, "repetition_penalty")
    repetition_window: int | None = like(Sampling, "repetition_window")
    no_repeat_ngram_size: int | None = like(Sampling, "no_repeat_ngram_size")
    stop_at_end: bool | None = like(Sampling, "stop_at_end", more="")
    stop_strings: str | None = like(Sampling, "stop_strings", more="")
    seed: int | None = like(Sampling, "seed")
    lookup: int | None = like(Sampling, "lookup")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            Sampling(**self.sampling())
        except UserError as error:  # which has Python's names
            name, _, rest = str(error).partition(" ")
            raise UserError(f"{flag(name)} {rest}") from None

    def load(self) -> LoadedModel:
        """The model and its tokenizer; an unknown method is refused before anything is loaded."""
        from kvalign.foundation.machine import AUTO as AUTO_DEVICE
        from kvalign.models.loading import load_model
        from kvalign.models.packed import PACKED, weights_of

        check_name(self.method)
        loaded = load_model(self.model, self.device, weights=self.weights)
        weights, device = weights_of(loaded.model), loaded.model.device
        if device.type != "cpu" and self.device == AUTO_DEVICE:
            same = "" if self.weights != "auto" else f", weights {weights} as in the file"
            print(f"device {device}{same} (--device cpu, --weights float32)", file=sys.stderr)
        elif self.weights == "auto" and weights in PACKED:
            print(f"weights {weights}: as in the file (--weights float32)", file=sys.stderr)
        return loaded

    def stream(
        self,
        loaded: LoadedModel,
        prompt: Sequence[int] = (),
        num_sinks: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        num_streams: int = 1,
        is_edited: bool = False,
    ) -> TextStream:
        """A new stream; what was chosen is told on stderr.

        Args:
            defaults: sampling without a flag.
            num_streams: at once, for which a default --cache-size leaves memory.
            is_edited: `auto` chooses a method whose streams can be edited.
        """
        from kvalign.methods import make_method
        from kvalign.methods.choice import choose, needs_cache
        from kvalign.streaming.text_stream import TextStream

        size, aligner, sizes = self.cache_size, self.aligner, self.sizes()
        cached = is_edited or needs_cache(sizes)
        choice = choose(loaded.model, self.method, cache_size=size, aligner=aligner, cached=cached)
        if choice.note:
            print(choice.note, file=sys.stderr)
        how = {"max_new_tokens": MAX_NEW_TOKENS, **(defaults or {}), **self.sampling()}
        sizes |= {"num_sinks": num_sinks, "num_streams": num_streams}
        streaming = make_method(
            choice, loaded.model, cache_size=size, compile=self.compile, **sizes
        )
        text_stream = TextStream(loaded.tokenizer, streaming, Sampling(**how))
        if prompt:
            text_stream.feed(prompt)
        if choice.why and aligner is None:
            line = f"method {choice.method}: {choice.why} (--method names another)"
            print(line, file=sys.stderr)
        if streaming.why_size and loaded.spec.name not in checkpoints.MODELS:
            size = streaming.sizes.cache_size
            line = f"cache of {size} entries: {streaming.why_size} (--cache-size names another)"
            print(line, file=sys.stderr)
        return text_stream

    def check_sinks(self, what: str, num_sinks: int) -> None:
        """Raise UserError if the never evicted entries leave no room in the given cache."""
        if self.cache_size is not None and num_sinks >= self.cache_size:
            raise UserError(f"{what} takes {num_sinks} entries: --cache-size must be above that")

    def values_of(self, stream: TextStream) -> dict[str, Any]:
        """Return the settings of a stream, as JSON values: its own, and the flags for the rest."""
        from kvalign.models.packed import weights_of

        method = stream.method
        values = {**asdict(method.sizes), **asdict(stream.sampling)}
        values["compile"] = method.steps_in_a_word in ("compiled", "stored")
        values |= {"weights": weights_of(method.model), "device": str(method.model.device)}
        return {**self.as_dict(), "method": method.name, **values}

    def sampling(self) -> dict[str, Any]:
        """Return the flags' sampling; a flag of drawing implies that tokens are drawn."""
        values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        return drawing({name: value for name, value in values.items() if value is not None})


def sinks_of(value: str, *words: str) -> int | None:
    """Number of `--num-sinks`; None for one of these words; UserError for anything else."""
    if value in words:
        return None
    if not (value.isascii() and value.isdigit()):
        needed = " or ".join([*words, "a number"])
        raise UserError(f"--num-sinks must be {needed}, got {value!r}")
    return int(value)


def pieces_of(stream: TextStream, name: str) -> Iterator[str]:
    """The pieces of a stream, after its input was read with a named bar; the first may be empty."""
    pieces = iter(stream)
    with progress.shown_as(name) as bar:
        bar.phase("reading")
        bar.expect(len(stream.ids) - stream.num_fed, "tokens")
        stream.method.on_tokens = bar.update
        first = next(pieces, "")
    return chain([first], pieces)
