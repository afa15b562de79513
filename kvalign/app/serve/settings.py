"""Settings of `kvalign serve`."""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from kvalign.app.sessions.conversation import TalkSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import like, option
from kvalign.streaming.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class ServeSettings(TalkSettings):
    """Serve a model behind the OpenAI API: chat, completions and responses.

    Each stream has a cache of fixed size and no end. A request with a `session` (field, or header
    X-Session-Id) continues that session. If neither a request nor a flag sets sampling, the model's
    generation_config does, else the defaults of `kvalign chat` hold. The key may also be in
    KVALIGN_API_KEY.

    Example:
        kvalign serve --model gpt2-mini --cache-size 128 --sessions talks
    """

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0: for other machines, too")
    port: int = option(8000, help="port to listen on; 0: a free one", at_least=0, at_most=65535)
    api_key: str | None = option(
        None, help="bearer token for requests; required if --host lets other machines connect"
    )
    without_key: bool = option(False, help="let other machines connect without a key")
    allowed_hosts: tuple[str, ...] | None = option(
        None, help="values of the Host header that are allowed, besides localhost and addresses"
    )
    allowed_origins: tuple[str, ...] | None = option(
        None, help="origins of pages that may connect, besides its own: chrome-extension://ID"
    )
    beside: str | None = option(
        None,
        help="another METHOD, or METHOD:CACHE_SIZE, that streams beside this one: on the page, and "
        "at /beside/v1; its sessions are in memory",
    )
    no_page: bool = option(False, help="no page at /, where a browser chats and sees the cache")
    sessions: Path | None = option(
        None, help="folder for sessions, which outlive a restart (default: none)", writes="folder"
    )
    max_sessions: int = option(
        256, help="most named sessions to keep; then the least recently used goes", at_least=1
    )
    max_unnamed: int = option(
        64, help="most unnamed conversations in memory, found by their beginning", at_least=0
    )
    keep_unnamed: bool = option(False, help="keep unnamed conversations in --sessions, too")
    edit: bool = option(
        False,
        help="a conversation without a session whose earlier messages were changed or left out "
        "keeps what follows them: it is moved, not encoded again, and knows what it has read",
    )
    exactly: int = option(
        4, help="tokens behind each change of --edit that are encoded again", at_least=0, at_most=16
    )
    max_streams: int = option(64, help="most streams at the same time", at_least=1)
    max_queue: int = option(256, help="most requests that may wait; more get 429", at_least=0)
    max_new_tokens: int | None = like(Sampling, "max_new_tokens", more=" (default: 2048)")
    max_prompt_tokens: int = option(32768, help="most tokens of one request", at_least=1)
    max_body_kb: int = option(1024, help="most kilobytes of a request's body", at_least=1)
    seed: int | None = option(None, help="seed of requests without (default: random)", at_least=0)
    timeout: float = option(30.0, help="seconds to send a request, or to receive a piece", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.without_key and self.api_key is not None:
            raise UserError("--without-key and a key contradict each other: leave one out")
        if self.edit and self.evict == "turns":
            raise UserError("--edit and --evict turns contradict each other: leave one out")
        if self.keep_unnamed and self.sessions is None:
            raise UserError("--keep-unnamed needs a folder: --sessions DIR")

    def as_kept(self) -> Self:
        """The same with the sizes of the sessions in its folder, where no flag says them: the
        default ones are as large as the free memory allows, and a restart goes on with the old.
        """
        from kvalign.streaming import stream_file

        for path in self.sessions.glob("*.safetensors") if self.sessions else ():
            with suppress(UserError):
                saved = stream_file.about(path).model_extra or {}
                sizes = {name: getattr(self, name) for name in ("cache_size", "memory")}
                kept = {name: saved.get(name, 0) for name, size in sizes.items() if size is None}
                return replace(self, **kept)
        return self

    def of_beside(self) -> Self:
        """Settings of what streams beside, without those that its method does not take; UserError
        for an unknown method or a wrong size.
        """
        from kvalign.methods.registry import AUTO, METHODS

        assert self.beside is not None
        method, _, size = self.beside.partition(":")
        if size and not (size.isascii() and size.isdigit()):
            raise UserError(f"--beside must be METHOD or METHOD:CACHE_SIZE, got {self.beside!r}")
        other = dict[str, Any](method=method, beside=None, sessions=None, keep_unnamed=False)
        if size:
            other["cache_size"] = int(size)
        if method != AUTO:
            cls = METHODS.find(method)
            ignored = (*cls.ignored_settings(), *(() if cls.takes_aligner else ("aligner",)))
            defaults = {one.name: one.default for one in fields(self)}
            other |= {name: defaults[name] for name in ignored if name in defaults}
            other["edit"] = self.edit and cls.takes_policy
        return replace(self, **other)
