"""Settings of a method and of a stream of text, shared by the commands that stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

from kvalign import checkpoints
from kvalign.cache.default_size import MOST, OF_A_MINI
from kvalign.cache.sizes import OF_POLICY, CacheDtype, Positions, num_evicted_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import (
    CACHE_DTYPE,
    MEMORY,
    MOST_SEED,
    NUM_EVICTED,
    NUM_RECALLED,
    NUM_RECENT,
    OF_WEIGHTS,
    POLICY,
    POSITIONS,
    WEIGHTS,
    ModelSettings,
    Settings,
    flag,
    option,
)
from kvalign.methods.registry import AUTO, check_name
from kvalign.policies import OLDEST, POLICIES
from kvalign.streaming.sampling import DRAWS, Sampling

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.text_stream import TextStream

MAX_NEW_TOKENS = 200
# Settings of Python and of evaluations: elsewhere the model's plan says them.
NO_FLAGS = ("recall_places", "recall_layers")
SIZES = tuple(x for x in ("num_evicted", "realign_every", *OF_POLICY) if x not in NO_FLAGS)


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """Base of the settings of commands that stream with a method."""

    method: str = option(
        AUTO,
        help="streaming method (kvalign methods lists them); auto: the one that fits the model",
    )
    cache_size: int | None = option(
        None,
        help="entries the cache keeps, sinks included (default: as many as the context length "
        f"and a quarter of the free memory allow, at most {MOST}; for a mini model "
        f"{OF_A_MINI})",
        at_least=1,
    )
    num_evicted: str | None = option(None, help=NUM_EVICTED)
    realign_every: int | None = option(
        None,
        help="number of evictions after which kvalign realigns (default: 1)",
        at_least=1,
    )
    policy: str | None = option(None, help=f"{POLICY}; default: {OLDEST}", choices=POLICIES)
    num_recent: int | None = option(None, help=NUM_RECENT, at_least=0)
    positions: str | None = option(
        None, help=f"{POSITIONS} (default: compact)", choices=get_args(Positions)
    )
    cache_dtype: str | None = option(
        None, help=f"{CACHE_DTYPE} (default: model)", choices=get_args(CacheDtype)
    )
    memory: int | None = option(None, help=f"{MEMORY} (default: 0, none)", at_least=0)
    num_recalled: int | None = option(None, help=NUM_RECALLED, at_least=1)
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

    weights: str = option("auto", help=OF_WEIGHTS, choices=WEIGHTS)
    compile: bool | None = option(
        None,
        help="compile the step: the start is slow, steps are faster, and if possible the step is "
        "stored for later starts (default: take a stored one, see kvalign compile)",
    )
    # Their ranges are those of `Sampling`.
    max_new_tokens: int | None = option(
        None, help=f"most tokens to generate (default: {MAX_NEW_TOKENS})"
    )
    do_sample: bool | None = option(
        None, help="draw each token (the default); --no-do-sample takes the most likely one"
    )
    temperature: float | None = option(
        None,
        help="divides the logits before drawing; 0 takes the most likely token "
        f"(default: {Sampling.temperature:g})",
    )
    top_k: int | None = option(
        None,
        help="draw from the k most likely tokens; 1 takes the most likely, 0 draws from all "
        f"(default: {Sampling.top_k})",
    )
    top_p: float | None = option(
        None,
        help="draw from the fewest tokens whose probabilities add up to this "
        f"(default: {Sampling.top_p:g}, off)",
    )
    min_p: float | None = option(
        None,
        help="draw from tokens with at least this share of the highest probability "
        f"(default: {Sampling.min_p:g}, off)",
    )
    repetition_penalty: float | None = option(
        None,
        help="above 1, tokens that occurred before, also evicted ones, are less likely "
        f"(default: {Sampling.repetition_penalty:g}, off)",
    )
    repetition_window: int | None = option(
        None,
        help="number of tokens that were generated last, to which --repetition-penalty is limited; "
        f"0: all tokens (default: {Sampling.repetition_window})",
    )
    no_repeat_ngram_size: int | None = option(
        None,
        help=f"never repeat an n-gram of this size (default: {Sampling.no_repeat_ngram_size}, off)",
    )
    stop_at_end: bool | None = option(
        None, help="stop at a token that ends a text or an answer of the model"
    )
    stop_strings: str | None = option(None, help="stop when this text has been generated")
    seed: int | None = option(
        None, help="seed of the draws (default: a random one, which is printed)", at_most=MOST_SEED
    )

    lookup: int | None = option(
        None,
        help="most tokens to guess at a time, from what followed the same words before: the same "
        f"text, faster if it repeats itself (default: {Sampling.lookup}, off)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            Sampling(**self.sampling())
        except UserError as error:  # which has Python's names
            name, _, rest = str(error).partition(" ")
            raise UserError(f"{flag(name)} {rest}") from None

    @property
    def num_streams(self) -> int:
        """Number of streams at once, for which a default --cache-size leaves memory."""
        return 1

    def load(self) -> LoadedModel:
        """The model and its tokenizer; an unknown method is refused before anything is loaded."""
        from kvalign.foundation.device import AUTO as AUTO_DEVICE
        from kvalign.models.loading import load_model
        from kvalign.models.packed import PACKED, weights_of

        check_name(self.method)
        loaded = load_model(self.model, self.device, self.dtype, self.weights)
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
        prompt: str = "",
        num_sinks: int | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> TextStream:
        """A new stream, like `kvalign.stream`. The choice of `auto` is printed on stderr.
        `defaults` hold for sampling without a flag.
        """
        from kvalign.methods import make_method
        from kvalign.methods.choice import choose
        from kvalign.streaming.text_stream import TextStream

        size, aligner = self.cache_size, self.aligner
        choice = choose(loaded.model, self.method, cache_size=size, aligner=aligner)
        if choice.note:
            print(choice.note, file=sys.stderr)
        how = {"max_new_tokens": MAX_NEW_TOKENS, **(defaults or {}), **self.sampling()}
        streaming = make_method(
            choice.method,
            loaded.model,
            cache_size=size,
            num_sinks=num_sinks,
            aligner=choice.aligner,
            compile=self.compile,
            num_streams=self.num_streams,
            **self.sizes(),
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
            raise UserError(
                f"{what} takes {num_sinks} entries, so --cache-size must be above that, got "
                f"{self.cache_size}"
            )

    def values_of(self, stream: TextStream) -> dict[str, Any]:
        """Return the settings of a stream, as JSON values: the flags, and the stream's own values
        for the rest.
        """
        from kvalign.models.packed import weights_of

        method = stream.method
        values = {**asdict(method.sizes), **asdict(stream.sampling)}
        values["compile"] = method.steps_in_a_word in ("compiled", "stored")
        values |= {"weights": weights_of(method.model), "device": str(method.model.device)}
        return {**self.as_dict(), "method": method.name, **values}

    def sampling(self) -> dict[str, Any]:
        """Return the flags' sampling; a flag of drawing implies that tokens are drawn."""
        values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        flags = {name: value for name, value in values.items() if value is not None}
        return {"do_sample": True, **flags} if flags.keys() & set(DRAWS) else flags


def num_of_keep(keep: str, all_of: str) -> int | None:
    """Number that `--keep` gives, None for its one word; UserError for anything else."""
    if keep == all_of:
        return None
    if not (keep.isascii() and keep.isdigit()):
        raise UserError(f"--keep must be {all_of} or a number of tokens, got {keep!r}")
    return int(keep)


def pieces_of(stream: TextStream, name: str) -> Iterator[str]:
    """The pieces of a stream, once the input before the first is read, with a named progress bar;
    the first may be empty.
    """
    pieces = iter(stream)
    with progress.shown_as(name) as bar:
        bar.phase("reading")
        bar.expect(len(stream.ids) - stream.num_fed, "tokens")
        stream.method.on_tokens = bar.update
        first = next(pieces, "")
    return chain([first], pieces)
