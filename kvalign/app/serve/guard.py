"""What stands before the routes: who may ask, from where, and how much."""

import asyncio
import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.metrics import Metrics

_OPEN = ("/health",)  # asks for no key


@dataclass
class Guard:
    """ASGI middleware that checks Host, Origin and key, and counts what is answered.

    A page that a browser shows may have a name that leads here (DNS rebinding), or send requests
    from elsewhere: names are those of `allowed_hosts`, and an Origin is this very host.
    """

    app: ASGIApp
    api_key: str | None
    allowed_hosts: Collection[str]
    paths: Collection[str]
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
                f"the host {host!r:.80} is not served here: --allowed-hosts names more",
                403,
                code="host_not_allowed",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestError(
                f"pages of {origin!r:.80} may not ask here", 403, code="origin_not_allowed"
            )
        if self.api_key is not None and path not in _OPEN:
            kind, _, key = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
            if kind.lower() != "bearer" or not is_right:
                raise RequestError(
                    "no API key, or a wrong one: send it as Authorization: Bearer KEY",
                    401,
                    code="invalid_api_key",
                )

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


async def body_of(request: Request, most_bytes: int, timeout: float) -> bytes:
    """The body of a request; RequestError where it is no JSON by its type, too large, or late."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"the body must be application/json, its Content-Type is {kind!r:.80}", 415
        )
    too_large = RequestError(
        f"the body must be at most {most_bytes} bytes", 413, code="body_too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError(
            f"the body did not come within {timeout:g} seconds", 408, code="timeout"
        ) from None
    return bytes(body)
