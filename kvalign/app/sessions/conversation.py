"""One endless conversation: new, or resumed from its file; answered turn by turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.app.sessions.stream_settings import StreamSettings, pieces_of
from kvalign.foundation.errors import Interrupted, RunError, UserError
from kvalign.foundation.runs import held_back
from kvalign.foundation.settings import flag, option
from kvalign.streaming.sampling import Sampling

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.text_stream import TextStream

SYSTEM = "system"  # the note of a stream that holds --system


@dataclass(frozen=True, kw_only=True)
class TalkSettings(StreamSettings):
    """Base of the settings of conversations: their first words may stay, their answers end."""

    num_sinks: str = option(
        "auto",
        help="first entries that stay; auto: what comes before the user's first word where a "
        "system prompt does, else the method's default",
    )
    stop_at_end: bool | None = option(
        None, help="an answer ends at the model's end-of-text token (the default)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sinks_of(self.num_sinks)


@dataclass(frozen=True, kw_only=True)
class ConversationSettings(TalkSettings):
    """Hold one endless conversation in the terminal, with the model's chat template if it has one.

    Ctrl-C stops an answer, Ctrl-D ends, /help lists what else can be typed. Without a terminal,
    each line of stdin is a turn. Where no flag says how to sample, the model's generation_config
    does; in a conversation that goes on, what is saved with it.

    Example:
        kvalign chat --say "Who lived on the island?" --max-new-tokens 30 --state talk.safetensors
    """

    system: str | None = option(None, help="what the model is told first; it is never evicted")
    say: str | None = option(None, help="one turn to say, instead of reading turns")
    state: Path | None = option(
        None,
        help="file of the conversation: resumed if it exists, written after each answer",
        writes="file",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.say is not None and not self.say.strip():
            raise UserError("--say is empty: give at least one word")


class Conversation:
    """A stream that is fed the user's turns; `path` is written after each answer, if there is
    one.
    """

    def __init__(self, settings: ConversationSettings, loaded: LoadedModel):
        from kvalign.streaming.turns import turn_ids

        self.settings, self.tokenizer, self.path = settings, loaded.tokenizer, settings.state
        is_resumed = settings.state is not None and settings.state.exists()
        # A chat template that fails is known before anything is said.
        if not is_resumed:
            turn_ids(loaded.tokenizer, "?", True, settings.system)
        self.stream = (_resume if is_resumed else _begin)(settings, loaded)
        turn_ids(loaded.tokenizer, "?", not self.stream.ids, self.stream.notes.get(SYSTEM))

    def answer(self, turn: str) -> Iterator[str]:
        """The pieces of the answer to a turn, with a bar over a long one; Ctrl-C ends the answer.
        Then the file is written.
        """
        from kvalign.streaming.turns import turn_ids

        stream = self.stream
        with held_back(signal.SIGINT) as interrupted:  # in a step, it would break the cache
            system = stream.notes.get(SYSTEM)
            stream.feed(turn_ids(self.tokenizer, turn, not stream.ids, system))
            for piece in pieces_of(stream, "turn"):
                yield piece
                if interrupted.is_set():
                    break
        if self.path:
            try:
                stream.save(self.path)
            except OSError as error:
                raise RunError(f"this answer is not kept: {error}") from error

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Let Ctrl-C say what of it is in its file, and the command that goes on with that."""
        try:
            yield
        except KeyboardInterrupt as stop:
            if self.path is None or not self.path.exists():
                raise
            kept = f"{self.path} holds the conversation up to its last answer"
            raise Interrupted(kept, self.to_go_on()) from stop

    def to_go_on(self) -> str:
        """The command that takes it up from its file."""
        same = ("model", "dtype", "device", "aligner", "compile")
        given = {name: getattr(self.settings, name) for name in same}
        return ConversationSettings(**given, state=self.path).command_line("chat")

    def about(self) -> str:
        """What it is, in a line: model, method, sizes, sampling, file."""
        stream = self.stream
        sampling, says = stream.sampling, Sampling.of_model(stream.method.model.generation_config)
        flags = sampling.in_flags()
        taken = [
            flag(name)
            for name, value in says.items()
            if flag(name) in flags.split() and getattr(sampling, name) == value
        ]
        by_model = f" ({', '.join(taken)}: of the model's generation_config)" if taken else ""
        goes_on = f", {len(stream.ids)} tokens so far" if stream.ids else ""
        kept = f"; kept in {self.path}{goes_on}" if self.path else ""
        return (
            f"{stream.method.spec.name} by {stream.method.in_words}; "
            f"--max-new-tokens {sampling.max_new_tokens} {flags}{by_model}{kept}"
        )


def turns(say: str | None = None) -> Iterator[str]:
    """What the user says, without empty turns: `say` alone, or else what stdin has."""
    if say is not None:
        yield say
        return
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  line editing in input()

    while True:
        try:
            turn = input("\n> ").strip()
        except EOFError:
            print()
            return
        if turn:
            yield turn


def sinks_of(num_sinks: str) -> int | None:
    """The number that `--num-sinks` says, None for auto; UserError if it says neither."""
    if num_sinks == "auto":
        return None
    if not (num_sinks.isascii() and num_sinks.isdigit()):
        raise UserError(f"--num-sinks must be auto or a number, got {num_sinks!r}")
    return int(num_sinks)


def _begin(settings: ConversationSettings, loaded: LoadedModel) -> TextStream:
    from kvalign.streaming.turns import opening_len

    num_sinks = sinks_of(settings.num_sinks)
    if num_sinks is None and settings.system is not None:
        num_sinks = opening_len(loaded.tokenizer, settings.system)
        if num_sinks >= settings.cache_size:
            raise UserError(
                f"--system takes {num_sinks} entries, so --cache-size must be above that, got "
                f"{settings.cache_size}"
            )
    defaults = {"stop_at_end": True, **Sampling.of_model(loaded.model.generation_config)}
    stream = settings.stream(loaded, num_sinks=num_sinks, defaults=defaults)
    if settings.system is not None:
        stream.notes[SYSTEM] = settings.system
    return stream


def _resume(settings: ConversationSettings, loaded: LoadedModel) -> TextStream:
    from kvalign.streaming import stream_file
    from kvalign.streaming.text_stream import load_stream

    assert settings.state is not None
    has_aligner = stream_file.read(settings.state)[0].aligner is not None
    stream = load_stream(
        settings.state,
        loaded.model,
        loaded.tokenizer,
        aligner=settings.aligner_for(loaded) if has_aligner else settings.aligner,
        compile=settings.compile,
        **settings.sampling(),
    )
    saved = asdict(stream.method.sizes) | {"method": stream.method.name}
    saved[SYSTEM] = stream.notes.get(SYSTEM)
    for name, value in settings.changed().items():
        if name in saved and str(value) != str(saved[name]):
            raise UserError(
                f"the conversation in {settings.state} has its own {flag(name)}: leave it out, or "
                "name another --state"
            )
    return stream
