"""One endless conversation: new, or resumed from its file; answered turn by turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from kvalign.app.stream_settings import StreamSettings
from kvalign.errors import UserError
from kvalign.settings import flag, option

if TYPE_CHECKING:
    from kvalign.models import LoadedModel
    from kvalign.text_stream import TextStream


@dataclass(frozen=True, kw_only=True)
class ConversationSettings(StreamSettings):
    """Hold one endless conversation in the terminal, with the model's chat template if it has one.

    Ctrl-C stops an answer, Ctrl-D ends. Without a terminal, each line of stdin is a turn.

    Example:
        kvalign chat --say "Who lived on the island?" --max-new-tokens 30 --state talk.safetensors
    """

    system: str | None = option(None, help="what the model is told first; it is never evicted")
    say: str | None = option(None, help="one turn to say, instead of reading turns")
    state: Path | None = option(
        None, help="file of the conversation: resumed if it exists, written after each answer"
    )
    cache_size: int = option(128, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: str = option(
        "auto",
        help="first entries that stay; auto: what comes before the user's first word if there is a "
        "--system, else the method's default",
    )
    max_new_tokens: int = option(200, help="tokens of an answer at most", at_least=1)
    stop_at_end: bool = option(True, help="an answer ends at the model's end-of-text token")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.say is not None and not self.say.strip():
            raise UserError("--say is empty: give at least one word")
        if self.num_sinks != "auto" and not (self.num_sinks.isascii() and self.num_sinks.isdigit()):
            raise UserError(f"--num-sinks must be auto or a number, got {self.num_sinks!r}")


class Conversation:
    """A stream that is fed the user's turns.

    Args:
        settings: what the stream is, and the file to keep it in.
        loaded: the model and its tokenizer.

    Raises:
        UserError: sizes that do not fit, or settings that the conversation in the file contradicts.
    """

    def __init__(self, settings: ConversationSettings, loaded: LoadedModel):
        self.settings, self.tokenizer = settings, loaded.tokenizer
        is_resumed = settings.state is not None and settings.state.exists()
        self.stream = (_resume if is_resumed else _begin)(settings, loaded)

    def answer(self, turn: str) -> Iterator[str]:
        """The pieces of the answer to a turn; Ctrl-C ends it. Then the file is written."""
        from kvalign.turns import turn_ids

        stream = self.stream
        with _interruption() as interrupted:
            stream.feed(turn_ids(self.tokenizer, turn, not stream.ids, self.settings.system))
            for piece in stream:
                yield piece
                if interrupted.is_set():
                    break
        if self.settings.state:
            stream.save(self.settings.state)


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


def _begin(settings: ConversationSettings, loaded: LoadedModel) -> TextStream:
    from kvalign.turns import opening_len

    num_sinks = None if settings.num_sinks == "auto" else int(settings.num_sinks)
    if num_sinks is None and settings.system is not None:
        num_sinks = opening_len(loaded.tokenizer, settings.system)
        if num_sinks >= settings.cache_size:
            raise UserError(
                f"--system takes {num_sinks} entries, so --cache-size must be above that, got "
                f"{settings.cache_size}"
            )
    return settings.stream(loaded, num_sinks=num_sinks)


def _resume(settings: ConversationSettings, loaded: LoadedModel) -> TextStream:
    from kvalign import stream_file
    from kvalign.text_stream import load_stream

    assert settings.state is not None
    has_aligner = stream_file.read(settings.state)[0].aligner is not None
    stream = load_stream(
        settings.state,
        loaded.model,
        loaded.tokenizer,
        aligner=settings.aligner_for(loaded) if has_aligner else settings.aligner,
        compile=settings.compile,
    )
    saved = asdict(stream.sampling) | asdict(stream.method.sizes)
    saved |= {"method": stream.method.name, "system": None}
    for name, value in settings.changed().items():
        if name in saved and str(value) != str(saved[name]):
            raise UserError(
                f"the conversation in {settings.state} has its own {flag(name)}: leave it out, or "
                "name another --state"
            )
    return stream


@contextmanager
def _interruption() -> Iterator[Event]:
    """Within it, Ctrl-C sets the event: inside a step, it would leave the cache inconsistent."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
