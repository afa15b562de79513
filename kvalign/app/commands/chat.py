"""`kvalign chat`: one endless conversation in the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvalign.errors import UserError
from kvalign.settings import ModelSettings, option

_SAMPLING = (
    "max_new_tokens",
    "top_k",
    "temperature",
    "no_repeat_ngram_size",
    "stop_at_end",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class ConversationSettings(ModelSettings):
    """Hold one endless conversation in the terminal, with the model's chat template if it has one.

    Ctrl-C stops an answer, Ctrl-D ends. Without a terminal, each line of stdin is a turn.

    Example:
        kvalign chat --say "Who lived on the island?" --max-new-tokens 30 --state talk.safetensors
    """

    method: str = option("kvalign", help="streaming method; an unknown name lists the known ones")
    cache_size: int = option(128, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: str = option(
        "auto",
        help="first entries that stay; auto: what comes before the user's first word if there is a "
        "--system, else the method's default",
    )
    num_evicted: int | None = option(
        None, help="entries evicted at once (default: 1; discard-half: half the window)", at_least=1
    )
    aligner: str | None = option(
        None, help="aligner of kvalign: folder, hub id or shipped name (default: shipped)"
    )
    system: str | None = option(None, help="what the model is told first; it is never evicted")
    say: str | None = option(None, help="one turn to say, instead of reading turns")
    state: Path | None = option(
        None, help="file of the conversation: taken up if it is there, written after each answer"
    )
    max_new_tokens: int = option(200, help="tokens of an answer at most", at_least=1)
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    temperature: float = option(1.0, help="divides the logits before drawing", above=0)
    no_repeat_ngram_size: int = option(
        0, help="never repeat an n-gram of this size; 0: off", at_least=0
    )
    stop_at_end: bool = option(True, help="an answer ends at the model's end-of-text token")
    seed: int = option(0, help="seed of the draws")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_sinks != "auto" and not (self.num_sinks.isascii() and self.num_sinks.isdigit()):
            raise UserError(f"--num-sinks must be auto or a number, got {self.num_sinks!r}")


SETTINGS = ConversationSettings


def run(settings: ConversationSettings, as_json: bool) -> None:
    import json
    import sys

    from kvalign.methods import METHODS
    from kvalign.models import load_model
    from kvalign.turns import turn_ids

    METHODS.find(settings.method)  # before the model is loaded
    loaded = load_model(settings.model, settings.device, settings.dtype)
    stream = _resumed(settings, loaded) or _begun(settings, loaded)
    answers = []
    for turn in _turns(settings):
        stream.feed(turn_ids(loaded.tokenizer, turn, not stream.ids, settings.system))
        with _StopOnInterrupt() as stop:
            for piece in stream:
                if not as_json:
                    print(piece, end="", flush=True)
                if stop.asked:
                    break
        if settings.state:
            stream.save(settings.state)
        timing = stream.timing()
        answers.append({"turn": turn, "text": stream.text, **timing})
        if not as_json:
            print(flush=True)
            print(
                "[{num_tokens} tokens by {method}, {ms_per_token:.2f} ms/token; {num_ids} in all]"
                "".format(method=stream.method.title, num_ids=len(stream.ids), **timing),
                file=sys.stderr,
            )
    if as_json:
        print(json.dumps({"settings": settings.as_dict(), "answers": answers}))


def _begun(settings: ConversationSettings, loaded):
    from kvalign.text_stream import stream
    from kvalign.turns import opening_len

    num_sinks = None if settings.num_sinks == "auto" else int(settings.num_sinks)
    if num_sinks is None and settings.system is not None:
        num_sinks = opening_len(loaded.tokenizer, settings.system)
        if num_sinks >= settings.cache_size:
            raise UserError(
                f"--system takes {num_sinks} entries, so --cache-size must be above that, got "
                f"{settings.cache_size}"
            )
    return stream(
        loaded.model,
        loaded.tokenizer,
        method=settings.method,
        cache_size=settings.cache_size,
        num_sinks=num_sinks,
        num_evicted=settings.num_evicted,
        aligner=settings.aligner,
        **{name: getattr(settings, name) for name in _SAMPLING},
    )


def _resumed(settings: ConversationSettings, loaded):
    """The conversation in --state, if there is one; other flags may not contradict it."""
    if settings.state is None or not settings.state.exists():
        return None
    from kvalign.stream_file import load_stream

    stream = load_stream(settings.state, loaded.model, loaded.tokenizer, aligner=settings.aligner)
    method = stream.method
    held = {name: getattr(stream.sampling, name) for name in _SAMPLING}
    held |= {"method": method.name, "system": None, "num_sinks": str(method.sizes.num_sinks)}
    held |= {"cache_size": method.sizes.cache_size, "num_evicted": method.sizes.num_evicted}
    for name, value in settings.changed().items():
        if name in held and value != held[name]:
            raise UserError(
                f"the conversation in {settings.state} has its own --{name.replace('_', '-')}: "
                "leave it out, or name another --state"
            )
    return stream


def _turns(settings: ConversationSettings) -> Iterator[str]:
    """What the user says, turn by turn, without empty ones."""
    import sys

    if settings.say is not None:
        if not settings.say.strip():
            raise UserError("--say is empty: give at least one word")
        yield settings.say
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


class _StopOnInterrupt:
    """Within it, Ctrl-C asks to stop between two tokens: inside one, the cache would be torn."""

    def __enter__(self) -> "_StopOnInterrupt":
        import signal

        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *args: object) -> None:
        self.asked = True

    def __exit__(self, *args: object) -> None:
        import signal

        signal.signal(signal.SIGINT, self._before)
