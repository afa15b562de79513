"""Settings of `kvalign serve`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from kvalign.app.sessions.conversation import TalkSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import option


def lets_others_in(host: str) -> bool:
    """Return whether a server at this address can be reached from other machines."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(TalkSettings):
    """Serve a model behind the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models.

    Each stream has a cache of fixed size and no end. A request with a `session` (field, or header
    X-Session-Id) continues that session. If neither a request nor a flag sets sampling, the model's
    generation_config does. The key may also be in KVALIGN_API_KEY.

    Example:
        kvalign serve --model gpt2-mini --cache-size 128 --sessions talks
    """

    host: str = option("127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines in")
    port: int = option(
        8000, help="port to listen at; 0 takes any free one", at_least=0, at_most=65535
    )
    api_key: str | None = option(
        None, help="bearer token that requests must have; required if --host lets other machines in"
    )
    without_key: bool = option(False, help="let other machines in without a key")
    allowed_hosts: tuple[str, ...] | None = option(
        None, help="names that a request's Host may have, besides localhost and addresses"
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        help="origins of pages that may ask, besides this server's own: chrome-extension://ID",
    )
    sessions: Path | None = option(
        None,
        help="folder that keeps sessions over a restart (default: in memory only)",
        writes="folder",
    )
    max_sessions: int = option(
        256,
        help="named sessions that are kept; beyond that the least recently used one is dropped",
        at_least=1,
    )
    max_unnamed: int = option(
        64,
        help="conversations without a session that are kept in memory and found by their beginning",
        at_least=0,
    )
    keep_unnamed: bool = option(False, help="keep those in --sessions, too")
    max_streams: int = option(64, help="streams that run at the same time", at_least=1)
    max_queue: int = option(256, help="requests that may wait; further ones get 429", at_least=0)
    max_new_tokens: int | None = option(
        None, help="tokens of an answer that a request may ask for (default: 2048)", at_least=1
    )
    max_prompt_tokens: int = option(32768, help="tokens of one request at most", at_least=1)
    max_body_kb: int = option(1024, help="kilobytes of a request's body at most", at_least=1)
    compile: bool = option(False, help="not supported: the rows of a server change")
    top_k: int | None = option(
        None, help="draw from the k most likely tokens (default: 0, from all)", at_least=0
    )
    seed: int | None = option(
        None, help="seed of the draws of requests that name none (default: random)", at_least=0
    )
    timeout: float = option(
        30.0, help="seconds that a client has to send a request, and to take a piece", above=0
    )

    @property
    def lets_others_in(self) -> bool:
        return lets_others_in(self.host)

    @property
    def num_streams(self) -> int:
        return self.max_streams

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.without_key and self.api_key is not None:
            raise UserError("--without-key and a key contradict: leave one out")
        if self.keep_unnamed and self.sessions is None:
            raise UserError("--keep-unnamed needs a folder to keep them in: --sessions DIR")
        if self.compile:
            raise UserError("--compile is for one stream: the rows of a server come and go")
