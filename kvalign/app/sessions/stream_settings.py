"""The settings of a method and of a stream of text, which commands share that stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

from kvalign import checkpoints
from kvalign.cache.sizes import OF_POLICY, Positions, RecallBy, num_evicted_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import (
    MEMORY,
    MOST_SEED,
    NUM_EVICTED,
    NUM_RECALLED,
    NUM_RECENT,
    POLICY,
    POSITIONS,
    RECALL_BLOCK,
    RECALL_PLACES,
    ModelSettings,
    Settings,
    flag,
    option,
)
from kvalign.methods import AUTO, METHODS, check_name
from kvalign.policies import OLDEST, POLICIES
from kvalign.streaming.sampling import DRAWS, Sampling

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.text_stream import TextStream

MAX_NEW_TOKENS = 200
SIZES = ("num_evicted", "realign_every", *OF_POLICY)


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """Base of the settings of commands that stream with a method."""

    method: str = option(AUTO, help="streaming method (kvalign methods); auto: what fits the model")
    cache_size: int = option(128, help="entries the cache keeps, sinks included", at_least=1)
    num_evicted: str | None = option(None, help=NUM_EVICTED)
    realign_every: int | None = option(
        None,
        help="evicted entries after which kvalign moves those that stay (default: 1)",
        at_least=1,
    )
    policy: str | None = option(None, help=f"{POLICY}; default: {OLDEST}", choices=POLICIES)
    num_recent: int | None = option(None, help=NUM_RECENT, at_least=0)
    positions: str | None = option(
        None, help=f"{POSITIONS} (default: compact)", choices=get_args(Positions)
    )
    memory: int | None = option(None, help=f"{MEMORY} (default: 0, none)", at_least=0)
    num_recalled: int | None = option(None, help=NUM_RECALLED, at_least=1)
    recall_block: int | None = option(None, help=f"{RECALL_BLOCK} (default: 1)", at_least=1)
    recall_places: str | None = option(None, help=RECALL_PLACES, choices=get_args(RecallBy))
    aligner: str | None = option(
        None, help="aligner of kvalign: folder, hub id or shipped name (default: shipped)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        num_evicted_of(self.num_evicted or 1, 2)

    def sizes(self) -> dict[str, Any]:
        """What the flags say of what is evicted and moved, as `make_method` takes it."""
        return {name: getattr(self, name) for name in SIZES}


@dataclass(frozen=True, kw_only=True)
class StreamSettings(MethodSettings, ModelSettings):
    """Base of the settings of commands that stream text: method, sizes and sampling."""

    aligner: str | None = option(
        None,
        help="aligner of kvalign: folder, hub id or shipped name (default: shipped; where none is, "
        "the newest in kvalign-data/MODEL)",
    )
    compile: bool = option(
        False, help="compile the step with torch.compile: slow to begin, faster from then on"
    )
    max_new_tokens: int | None = option(
        None, help=f"tokens to generate at most (default: {MAX_NEW_TOKENS})", at_least=1
    )
    do_sample: bool | None = option(
        None, help="draw each token (the default); --no-do-sample takes the most likely one"
    )
    temperature: float | None = option(
        None,
        help="divides the logits before drawing; 0 takes the most likely token "
        f"(default: {Sampling.temperature:g})",
        at_least=0,
    )
    top_k: int | None = option(
        None,
        help="draw from the k most likely tokens; 1 takes the most likely, 0 draws from all "
        f"(default: {Sampling.top_k})",
        at_least=0,
    )
    top_p: float | None = option(
        None,
        help="draw from the fewest tokens whose probabilities add up to this "
        f"(default: {Sampling.top_p:g}, off)",
        above=0,
        at_most=1,
    )
    min_p: float | None = option(
        None,
        help="draw from tokens of at least this times the most likely one's probability "
        f"(default: {Sampling.min_p:g}, off)",
        at_least=0,
        at_most=1,
    )
    repetition_penalty: float | None = option(
        None,
        help="above 1, tokens that were there before, evicted ones too, are less likely "
        f"(default: {Sampling.repetition_penalty:g}, off)",
        above=0,
    )
    no_repeat_ngram_size: int | None = option(
        None,
        help=f"never repeat an n-gram of this size (default: {Sampling.no_repeat_ngram_size}, off)",
        at_least=0,
    )
    stop_at_end: bool | None = option(None, help="stop at the model's end-of-text token")
    stop_strings: str | None = option(None, help="stop where this text has been generated")
    seed: int | None = option(
        None,
        help="seed of the draws (default: a random one, which is printed)",
        at_least=0,
        at_most=MOST_SEED,
    )

    def __post_init__(self) -> None:
        if self.top_k == -1:  # all, to other programs
            raise UserError("--top-k must be at least 0, got -1: 0 draws from all")
        super().__post_init__()
        try:
            Sampling(**self.sampling())
        except UserError as error:  # which has Python's names
            name, _, rest = str(error).partition(" ")
            raise UserError(f"{flag(name)} {rest}") from None

    def load(self) -> LoadedModel:
        """The model and its tokenizer; an unknown method is refused before anything is loaded."""
        from kvalign.models.loading import load_model

        check_name(self.method)
        return load_model(self.model, self.device, self.dtype)

    def stream(
        self,
        loaded: LoadedModel,
        prompt: str = "",
        num_sinks: int | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> TextStream:
        """A new stream, as `kvalign.stream` makes it; what `auto` takes is said on stderr, and
        `defaults` of sampling are for what no flag says.
        """
        from kvalign.methods.choice import choose
        from kvalign.streaming.text_stream import stream

        aligner = self.aligner_for(loaded)
        method, why = self.method, ""
        if method == AUTO:
            choice = choose(loaded.model, cache_size=self.cache_size, aligner=aligner)
            method, why = choice.method, choice.why
        text_stream = stream(
            loaded.model,
            loaded.tokenizer,
            prompt,
            method=method,
            cache_size=self.cache_size,
            num_sinks=num_sinks,
            aligner=aligner,
            compile=self.compile,
            **self.sizes(),
            **{"max_new_tokens": MAX_NEW_TOKENS, **(defaults or {}), **self.sampling()},
        )
        if why and aligner is None:  # one that is named or was trained here needs no more words
            print(f"method {method}: {why} (--method names another)", file=sys.stderr)
        return text_stream

    def used(self, stream: TextStream) -> dict[str, Any]:
        """What holds for a stream, as JSON can hold it: the settings, and what the stream takes
        where they leave it open or where it goes on from a file.
        """
        taken = {**asdict(stream.method.sizes), **asdict(stream.sampling)}
        return {**self.as_dict(), "method": stream.method.name, **taken}

    def sampling(self) -> dict[str, Any]:
        """What the flags say of sampling; one that says how to draw says that tokens are drawn."""
        values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        given = {name: value for name, value in values.items() if value is not None}
        return {"do_sample": True, **given} if given.keys() & set(DRAWS) else given

    def aligner_for(self, loaded: LoadedModel) -> str | None:
        """The aligner to take: what is named, else None for what ships, else what was trained here;
        what was is said on stderr.
        """
        from kvalign.methods.choice import trained_here

        if self.aligner is not None:
            return self.aligner
        is_auto = self.method == AUTO
        if not is_auto and not METHODS.find(self.method).takes_aligner:
            return None
        trained = trained_here(loaded.model, self.model, at_least="judged" if is_auto else "any")
        shipped, taken = checkpoints.default_aligner(self.model), None
        if trained is not None and shipped is None:
            taken = str(trained)
            said = f"{trained}, trained here, is taken: none ships for {self.model}"
        elif trained is not None:
            said = (
                f"{trained} was trained here: --aligner {trained} takes it in place of the shipped "
                f"{shipped}"
            )
        elif is_auto and (other := trained_here(loaded.model, self.model)):
            said = (
                f"{other}, trained here, was not judged by streams and is not taken: --method "
                "kvalign takes it"
            )
        else:
            return None
        print(said, file=sys.stderr)
        return taken


def pieces_of(stream: TextStream, name: str) -> Iterator[str]:
    """The pieces of a stream, with a bar of a name over what is read before the first, which may
    be empty.
    """
    pieces = iter(stream)
    with progress.shown_as(name) as bar:
        bar.phase("reading")
        bar.expect(len(stream.ids) - stream.num_fed, "tokens")
        stream.method.on_tokens = bar.update
        first = next(pieces, "")
    yield first
    yield from pieces
