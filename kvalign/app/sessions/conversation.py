"""One endless conversation: new, or resumed from its file; answered turn by turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvalign import checkpoints
from kvalign.app.sessions.stream_settings import StreamSettings, pieces_of, sinks_of
from kvalign.cache.memory_sizes import MOST_RECALLED
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import Interrupted, RunError, UserError
from kvalign.foundation.files import check_not_locked
from kvalign.foundation.runs import defer_signals
from kvalign.foundation.settings import DEFAULT_MODEL, flag, like, option
from kvalign.models import fetched
from kvalign.streaming import chat
from kvalign.streaming.sampling import MAX_NEW_TOKENS, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.text_stream import TextStream


LARGEST_MEASURED = 500_000_000
"""Weights of a model that is measured as a conversation begins."""
NUM_MEASURED = 1200  # tokens


@dataclass(frozen=True, kw_only=True)
class TalkSettings(StreamSettings):
    """Base of the settings of conversations, with a kept opening and answers that end."""

    most_recalled: ClassVar[int] = max(MOST_RECALLED.values())
    model: str = option("", help="shipped name, hub id or folder of a causal LM (default: fetched)")
    memory: int | None = like(
        CacheSizes,
        "memory",
        more=f" (default: {chat.OFFERED}, as far as half of the free memory has room, where the "
        "model's plan says that it helps)",
    )
    num_sinks: str = option(
        "auto",
        help="first entries that are never evicted; system: all before the user's first word; "
        "auto: the same if there is a system prompt, else the method's default",
    )
    evict: str = option(
        "entries",
        help="what a full cache evicts; turns: the oldest turns, and the rest is encoded again",
        choices=("entries", "turns"),
    )
    special_tokens: bool = option(
        False, help="special tokens in messages, such as <|im_end|>, act as such, not as plain text"
    )
    temperature: float | None = like(
        Sampling, "temperature", more=f" (default: the model's, else {chat.CALM['temperature']:g})"
    )
    top_p: float | None = like(
        Sampling, "top_p", more=f" (default: the model's, else {chat.CALM['top_p']:g})"
    )
    stop_at_end: bool | None = like(Sampling, "stop_at_end", more=" (the default)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sinks()

    def sinks(self) -> int | None:
        """Number that `--num-sinks` gives; None: auto or system."""
        return sinks_of(self.num_sinks, "auto", "system")

    def stream(self, loaded: LoadedModel, *args: Any, **how: Any) -> TextStream:
        """A new stream as of `StreamSettings`, with the memory that it has where no flag says."""
        stream = super().stream(loaded, *args, **how)
        if self.memory is not None or self.evict == "turns" or self.lookup:
            return stream
        method = stream.method
        try:
            if chat.may_remember(method):
                self._measure(loaded, method)
            of = how.get("num_streams", 1), self.most_recalled
            stream.method = chat.remembering(method, *of)
        except (UserError, OSError) as error:
            print(f"no memory: {error} (--memory 0 does without)", file=sys.stderr)
        if num := stream.method.sizes.memory:
            num_kb = chat.bytes_of_a_token(method) / 1000
            print(
                f"a memory keeps up to {num} evicted tokens, {num_kb:.0f} kB each, and steps get "
                "slower as it fills (--memory 0: none)",
                file=sys.stderr,
            )
        return stream

    def _measure(self, loaded: LoadedModel, method: Method) -> None:
        """Measure a model that has no plan, once; one that would take minutes has none."""
        from kvalign.memory.plan import find_plan
        from kvalign.models.model_folder import num_weights

        aligner = getattr(method, "aligner", None)
        if find_plan(loaded.model, aligner) or num_weights(method.model.config) > LARGEST_MEASURED:
            return
        from kvalign.training import tune_memory

        name = loaded.spec.name
        print(f"measuring once what a memory gives {name} (--memory 0: none)", file=sys.stderr)
        of = dict(method=method.name, aligner=None if aligner is None else aligner.source)
        tune_memory(model=name, num_tokens=NUM_MEASURED, quick=True, loaded=loaded, **of)

    def resolved(self) -> Self:
        """These settings with a model: the named one, or one that was fetched, which is printed.

        Raises:
            UserError: none was fetched.
        """
        if self.model:
            return self
        model = next(filter(fetched.model_path, fetched.MODELS), None)
        if model is None:
            name, source = next(iter(fetched.MODELS.items()))
            raise UserError(
                f"no model that can answer is here: fetch one ({fetched.how_to_fetch(name)}, "
                f"{source.size}), or name yours with --model ({DEFAULT_MODEL} ships, and only goes "
                "on with what you write)"
            )
        print(f"model {model}: fetched (--model names another)", file=sys.stderr)
        return replace(self, model=model)


@dataclass(frozen=True, kw_only=True)
class ConversationSettings(TalkSettings):
    """Hold one endless conversation in the terminal, with the model's chat template if it has one.

    Ctrl-C stops an answer, Ctrl-D ends, /help lists what else can be typed. Without a terminal,
    each line of stdin is a turn. Where no flag says how to sample, the model's generation_config
    does, else --temperature 0.3 --top-p 0.9 --repetition-penalty 1.1; in a conversation that goes
    on, what is saved with it.

    What is out of the cache goes to a memory, which takes back what is asked for; without one it
    is forgotten, which is said. The first start with a model measures whether a memory helps.

    Example:
        kvalign chat --model gpt2-mini --say "Who lived on the island?" --state talk.safetensors
    """

    most_recalled: ClassVar[int] = chat.MOST_RECALLED
    system: str | None = option(None, help="instructions before the first turn, never evicted")
    max_new_tokens: int | None = like(
        Sampling,
        "max_new_tokens",
        more=f" (default: {chat.MOST_OF_ANSWER}, without a template {MAX_NEW_TOKENS})",
    )
    repetition_penalty: float | None = like(
        Sampling,
        "repetition_penalty",
        more=f" (default: the model's, else {chat.UNREPEATED['repetition_penalty']:g}; 1: off)",
    )
    repetition_window: int | None = like(
        Sampling, "repetition_window", more=f" (default: {chat.WINDOW})"
    )
    num_recalled: int | None = like(
        CacheSizes, "num_recalled", more=f"; here at most {chat.MOST_RECALLED}", at_least=1
    )
    say: tuple[str, ...] | None = option(
        None, help="a turn, instead of reading turns; repeat it for more turns", repeats=True
    )
    state: Path | None = option(
        None, help="file of the conversation: read first, written after each answer", writes="file"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(turn.strip() for turn in self.say or ()):
            raise UserError("--say is empty: give at least one word")

    def resolved(self) -> Self:
        """The same, and before a fetched one that of the file."""
        from kvalign.streaming import stream_file

        if self.model or self.state is None or not self.state.exists():
            return super().resolved()
        saved = stream_file.about(self.state)
        weights = (saved.weights or "auto") if self.weights == "auto" else self.weights
        return replace(self, model=saved.base_model or DEFAULT_MODEL, weights=weights)


class Conversation(chat.Chat):
    """Conversation of the terminal; `path`, if given, is written after each answer."""

    def __init__(self, settings: ConversationSettings, loaded: LoadedModel):
        from kvalign.streaming.stream_file import checksum_of

        self.settings, self.path, self._checksum = settings, settings.state, ""
        is_resumed = settings.state is not None and settings.state.exists()
        if settings.state is not None:
            check_not_locked(settings.state.parent)
            self._checksum = checksum_of(settings.state)
        stream = (_resume if is_resumed else _begin)(settings, loaded)
        if settings.evict == "turns":
            stream.notes[chat.EVICT] = settings.evict
        super().__init__(stream, special_tokens=settings.special_tokens)

    def answer(self, turn: str | None) -> Iterator[str]:
        """The pieces of the answer to a turn, with a progress bar for a long turn; None: those with
        which an answer goes on that was cut. Ctrl-C ends the answer. Then the file is written.
        """
        stream = self.stream
        with defer_signals(signal.SIGINT) as interrupted:  # in a step, it would break the cache
            if turn is not None:
                self.feed(turn)
            elif stream.is_cut:
                stream.go_on()
            for piece in pieces_of(stream, "turn"):
                yield piece
                if interrupted.is_set():
                    break
        if self.path:
            try:
                self.save(self.path)
            except (OSError, UserError) as error:
                raise RunError(f"this answer was not saved: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, and from now on after each answer.

        Raises:
            UserError: the folder belongs to a server, or another program has written the file since
                this conversation did.
        """
        from kvalign.streaming.stream_file import checksum_of

        path = Path(path)
        check_not_locked(path.parent)
        if path == self.path and checksum_of(path) != self._checksum:
            raise UserError(f"{path} was since changed by another program")
        self.stream.save(path)
        self.path, self._checksum = path, checksum_of(path)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """On Ctrl-C print how much is in the file, and the command that continues it."""
        try:
            yield
        except KeyboardInterrupt as stop:
            if self.path is None or not self.path.exists():
                raise
            line = f"{self.path} holds the conversation up to its last answer"
            raise Interrupted(line, self.to_go_on()) from stop

    def to_go_on(self) -> str:
        """The command that continues it from its file."""
        # The file names the rest.
        same = ("device", "aligner", "compile", "special_tokens")
        values = {name: getattr(self.settings, name) for name in same}
        return ConversationSettings(**values, state=self.path).command_line("chat")

    def about(self) -> str:
        """The conversation in one line: model, method, sizes, sampling, file."""
        stream = self.stream
        sampling, says = stream.sampling, Sampling.of_model(stream.method.model.generation_config)
        flags = sampling.in_flags()
        same = [flag(name) for name, value in says.items() if getattr(sampling, name) == value]
        names = [one for one in same if one in flags.split()]
        by_model = f" ({', '.join(names)}: from the model's generation_config)" if names else ""
        goes_on = f", {len(stream.ids)} tokens so far" if stream.ids else ""
        file = f"; saved in {self.path}{goes_on}" if self.path else ""
        return (
            f"{stream.method.spec.name} with {stream.method.in_words}; --max-new-tokens "
            f"{sampling.max_new_tokens} {flags}{by_model}{of_template(self.tokenizer)}{file}"
        )


def of_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Addition to a line about a model, if it has no chat template."""
    return "" if tokenizer.chat_template else "; no chat template, so turns are plain text"


def _begin(settings: ConversationSettings, loaded: LoadedModel) -> TextStream:
    from kvalign.streaming.turns import Talk

    num_sinks = settings.sinks()
    opening = Talk(loaded.tokenizer, settings.system, settings.special_tokens).opening_len()
    if settings.num_sinks == "system" or (num_sinks is None and settings.system is not None):
        num_sinks = opening
        what = "--system" if settings.system is not None else "--num-sinks system"
        settings.check_sinks(what, num_sinks)
    if settings.memory and settings.num_recalled is None:
        num = chat.num_recalled_for(settings.cache_size, num_sinks)
        settings = replace(settings, num_recalled=num)
    defaults = chat.chat_defaults(loaded.model, loaded.tokenizer)
    stream = settings.stream(loaded, num_sinks=num_sinks, defaults=defaults)
    if settings.system is not None:
        stream.notes[chat.SYSTEM] = settings.system
    return stream


def _resume(settings: ConversationSettings, loaded: LoadedModel) -> TextStream:
    from kvalign.streaming.text_stream import load_stream

    assert settings.state is not None
    how = dict(aligner=settings.aligner, compile=settings.compile, **settings.sampling())
    stream = load_stream(settings.state, loaded.model, loaded.tokenizer, **how)
    source = getattr(getattr(stream.method, "aligner", None), "source", None)
    if settings.aligner is None and source and source not in checkpoints.ALIGNERS:
        print(f"using {source}, trained here, as before", file=sys.stderr)
    saved = asdict(stream.method.sizes) | {"method": stream.method.name}
    saved[chat.SYSTEM] = stream.notes.get(chat.SYSTEM)
    if settings.sinks() is None:
        del saved["num_sinks"]
    for name, value in settings.changed().items():
        if name in saved and str(value) != str(saved[name]):
            raise UserError(f"the talk in {settings.state} has its own {flag(name)}: leave it out")
    return stream
