"""The settings of `kvalign serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvalign.app.sessions.conversation import TalkSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import option


@dataclass(frozen=True, kw_only=True)
class ServeSettings(TalkSettings):
    """Serve a model behind OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/models.

    Each stream has a cache of fixed size and no end. A request with a `session` (field, or header
    X-Session-Id) goes on where that session is. Where neither a request nor a flag says how to
    sample, the model's generation_config does. The key may also be in KVALIGN_API_KEY.

    Example:
        kvalign serve --model gpt2-mini --cache-size 128 --sessions talks
    """

    host: str = option("127.0.0.1", help="address to listen at; 0.0.0.0 lets others in")
    port: int = option(
        8000, help="port to listen at; 0 takes any free one", at_least=0, at_most=65535
    )
    api_key: str | None = option(None, help="what a request must bring as its bearer token")
    allowed_hosts: tuple[str, ...] | None = option(
        None, help="names in a request's Host, beside localhost and addresses"
    )
    evict: str = option(
        "entries",
        help="what goes when the cache is full; turns: before a turn that would not fit, whole "
        "ones, the oldest first, and the rest is encoded anew",
        choices=("entries", "turns"),
    )
    sessions: Path | None = option(
        None, help="folder that keeps sessions over a restart; without, memory", writes="folder"
    )
    max_sessions: int = option(
        256, help="sessions that are kept; beyond, the least recently used go", at_least=1
    )
    max_streams: int = option(64, help="streams that are stepped at once", at_least=1)
    max_queue: int = option(
        256, help="requests that wait for a place; beyond, 429 is answered", at_least=0
    )
    max_new_tokens: int | None = option(
        None, help="tokens of an answer that a request may ask for (default: 2048)", at_least=1
    )
    max_prompt_tokens: int = option(32768, help="tokens that one request may bring", at_least=1)
    max_body_kb: int = option(1024, help="kilobytes of a request's body", at_least=1)
    compile: bool = option(False, help="refused here: the rows of a server come and go")
    top_k: int | None = option(
        None, help="draw from the k most likely tokens (default: 0, from all)", at_least=0
    )
    seed: int | None = option(
        None, help="seed of the draws of requests that name none (default: random)", at_least=0
    )
    timeout: float = option(
        30.0, help="seconds that a client has to send a request, and to take a piece", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile:
            raise UserError("--compile is for one stream: the rows of a server come and go")
