"""`kvalign generate`: stream text past the context length."""

from __future__ import annotations

import math
import os
import select
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign import checkpoints
from kvalign.app.cli.next_steps import of_model, say_next
from kvalign.app.sessions.stream_settings import StreamSettings, pieces_of, sinks_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_text, text_of
from kvalign.foundation.settings import NUM_SINKS, like, option
from kvalign.streaming.sampling import MAX_NEW_TOKENS, Sampling

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.text_stream import TextStream

PROMPT = "The history of the island"
MOST = 1024
"""Longest context length that a stream without a length passes; longer ones take minutes."""
BEYOND = 88
"""Number of tokens that it writes past that."""
QUIET_S, WAIT_S = 1.0, 10.0  # for a prompt; the first part of the wait is not spoken of


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(StreamSettings):
    """Stream text past the context length: text on stdout, timings on stderr. Ctrl-C ends it.

    Without a prompt it reads a pipe, or begins with a prompt of its own.

    Example:
        kvalign generate --cache-size 32 --max-new-tokens 40 --prompt "The history of the island"
    """

    prompt: str | None = option(None, help="text to continue")
    prompt_file: Path | None = option(
        None, help="file with the text to continue; -: standard input"
    )
    max_new_tokens: int | None = like(
        Sampling,
        "max_new_tokens",
        more=f" (default: past the context length if that is at most {MOST}, else "
        f"{MAX_NEW_TOKENS})",
    )
    num_sinks: str | None = option(None, help=f"{NUM_SINKS}; prompt: all of it")

    def __post_init__(self) -> None:
        super().__post_init__()
        sinks_of(self.num_sinks or "0", "prompt")

    def sinks_for(self, prompt_len: int) -> int | None:
        """First entries that are never evicted; None: the method's default."""
        if self.num_sinks != "prompt":
            return None if self.num_sinks is None else int(self.num_sinks)
        self.check_sinks("--num-sinks prompt", prompt_len)
        return prompt_len


def generate(settings: GenerateSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.models.input_ids import encoded

    source = read_prompt(settings.prompt, settings.prompt_file)
    loaded = settings.load()
    if source is None:
        source = piped_text()
    prompt = source if source.strip() else PROMPT
    ids = encoded(prompt, loaded.tokenizer, loaded.model)
    num_new = tokens_past(loaded.spec.context_len, len(ids))
    defaults = {} if num_new is None else {"max_new_tokens": num_new}
    text_stream = settings.stream(loaded, ids, settings.sinks_for(len(ids)), defaults)
    with suppress(KeyboardInterrupt):
        for number, piece in enumerate(marked(pieces_of(text_stream, "prompt"), text_stream)):
            if not as_json:
                print(piece if number else prompt + piece, end="", flush=True)
    if text_stream.method.tokens_left == 0:
        print("the stream ends here: the model has no more positions", file=sys.stderr)
    method, timing = text_stream.method, text_stream.timing()
    if not as_json:
        print()
    steps = f" with {method.steps_in_a_word} steps" if method.steps_in_a_word else ""
    print(
        f"{timing['num_tokens']} tokens with {method.in_words}: first after {timing['ttft_s']:.2f} "
        f"s, then {timing['ms_per_token']:.2f} ms/token{steps}; {text_stream.sampling.in_flags()}",
        file=sys.stderr,
    )
    if not as_json and prompt is not source:  # a first try
        _say_next(settings, loaded)
    return {
        "settings": settings.values_of(text_stream),
        "prompt": prompt,
        "text": text_stream.text,
        "token_ids": text_stream.token_ids,
        **timing,
    }


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """The prompt from one of the two flags; None if neither is given."""
    if prompt is not None and prompt_file is not None:
        raise UserError("give the text to continue with either --prompt or --prompt-file")
    if prompt_file == Path("-"):
        prompt = whole_text()
    elif prompt_file is not None and prompt_file.is_fifo():  # a shell's <(...)
        prompt = text_of(prompt_file.read_bytes(), prompt_file)
    elif prompt_file is not None:
        prompt = read_text(prompt_file)
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty: give at least one word")
    return prompt


def _say_next(settings: GenerateSettings, loaded: LoadedModel) -> None:
    """Compare the shipped aligner with the one trained here."""
    from kvalign.methods.choice import trained_here

    trained = trained_here(loaded.model)
    names = [settings.aligner, checkpoints.default_aligner(settings.model), trained]
    unique = dict.fromkeys(str(name) for name in names if name)
    aligners = ["--aligner", ",".join(unique)] if unique else []
    model = of_model(settings.model)
    say_next("eval", "perplexity", *model, *aligners, "--reference", "recompute")


def tokens_past(context_len: int | None, num_before: int) -> int | None:
    """Return how many tokens lead past the context length; None if there is none, or it is long."""
    if context_len is None or context_len > MOST:
        return None
    return max(context_len - num_before, 0) + BEYOND


def marked(pieces: Iterable[str], stream: TextStream) -> Iterator[str]:
    """The pieces; a line on stderr marks the first eviction and the end of the context length."""
    context_len = stream.method.spec.context_len or math.inf
    size, is_full, is_past = stream.method.sizes.cache_size, False, False
    full = f"the cache of {size} entries is full, from here on the oldest are evicted"
    past = f"the context length of {context_len} tokens ends here, the stream continues"
    for number, piece in enumerate(pieces):
        lines = []
        if not is_full and (is_full := stream.num_evicted > 0):
            lines.append(full)
        if not is_past and (is_past := stream.num_fed > context_len):
            lines.append(past)
        start = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""  # a line of its own
        for line in lines if number else ():  # else the prompt passed it: `warn_if_too_long`
            print(f"{start}[token {stream.num_fed}: {line}]", file=sys.stderr, flush=True)
        yield piece


def piped_text() -> str:
    """Return the piped text without its last line break; "" without a pipe.

    After `WAIT_S` seconds it gives up on an open and empty pipe, which some CI systems leave.
    """
    try:
        file = sys.stdin.fileno()
        mode = os.fstat(file).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file of the system's
        return ""
    is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    has_text = stat.S_ISREG(mode) or (is_pipe and _has_come(file))
    return whole_text().removesuffix("\n") if has_text else ""


def whole_text() -> str:
    """Standard input up to its end, without a time limit; UserError if it is not UTF-8 text."""
    return text_of(sys.stdin.buffer.read() if sys.stdin else b"", "standard input")


def _has_come(file: int) -> bool:
    try:
        if select.select([file], [], [], QUIET_S)[0]:
            return True
        about = "for a prompt on standard input; --prompt gives one, --prompt-file - waits longer"
        print(f"waiting {WAIT_S:g} s {about}", file=sys.stderr)
        return bool(select.select([file], [], [], WAIT_S - QUIET_S)[0])
    except OSError:  # Windows asks sockets alone
        return True
