"""Checks before the routes: which client may ask, and from which origin."""

import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.metrics import Metrics

_OPEN = ("/health",)  # asks for no key


@dataclass
class Guard:
    """ASGI middleware that checks Host, Origin and key, and counts answers.

    A page in a browser may use a host name that leads here (DNS rebinding), or send requests from
    another origin. So the host must be one of `allowed_hosts`, and an Origin this host or one of
    `allowed_origins`. A slash at the end of a path does not count.
    """

    app: ASGIApp
    api_key: str | None
    allowed_hosts: Collection[str]
    allowed_origins: Collection[str]
    paths: Collection[str]
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        try:
            self._check(Headers(scope=scope), scope["path"])
        except RequestError as error:
            await error.response()(scope, receive, counted)
            return
        await self.app(scope, receive, counted)

    def _check(self, headers: Headers, path: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._may_be(host):
            raise RequestError(
                f"the host {host!r:.80} is not allowed here: add it with --allowed-hosts",
                403,
                code="host_not_allowed",
            )
        if origin is not None and not self._may_ask(origin.lower(), host.lower()):
            raise RequestError(
                f"pages of {origin!r:.80} are not allowed here", 403, code="origin_not_allowed"
            )
        if self.api_key is not None and path not in _OPEN:
            kind, _, key = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
            if kind.lower() != "bearer" or not is_right:
                raise RequestError(
                    "API key missing or wrong: send it as Authorization: Bearer KEY",
                    401,
                    code="invalid_api_key",
                )

    def _may_ask(self, origin: str, host: str) -> bool:
        return origin in (f"http://{host}", f"https://{host}", *self.allowed_origins)

    def _may_be(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost" or name in self.allowed_hosts
        return True
