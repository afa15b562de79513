"""Routes, as an ASGI application, what is checked before them, and the server that listens."""

import asyncio
import contextlib
import gc
import hmac
import ipaddress
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvalign.app.pages import rendered
from kvalign.app.serve import cache_view
from kvalign.app.serve.engine import Engine, Metrics
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.replies import HEADERS, ChatForm, Events, EventStream, TextForm, whole
from kvalign.app.serve.responses import ResponseForm, ResponseRequest
from kvalign.app.serve.service import Service
from kvalign.app.serve.settings import ServeSettings
from kvalign.app.serve.turn import Answers, Event
from kvalign.app.serve.wire import ChatRequest, Completion, parsed
from kvalign.app.sessions.conversation import of_template
from kvalign.foundation.errors import UserError
from kvalign.models.loading import LoadedModel
from kvalign.streaming.calls import read_json

_READ = ["GET", "HEAD"]
_CLIENT_LEFT = 499  # what nginx calls a client that has left; nobody reads it


def build(settings: ServeSettings, loaded: LoadedModel, engine: Engine | None = None) -> FastAPI:
    """The application; its engine runs as long as it does. With the engine of another one it is a
    part of that: it checks no requests, and has no page.
    """
    service, name = Service(settings, loaded, engine), loaded.spec.name
    beside = build(settings.of_beside(), loaded, service.engine) if settings.beside else None
    reader = ThreadPoolExecutor(1, "kvalign-bodies")  # one at a time, beside the event loop

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        reader.shutdown(wait=False)
        await run_in_threadpool(service.stop)
        if beside is not None:
            await run_in_threadpool(beside.state.service.stop)

    app = FastAPI(lifespan=running, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service

    def check_model(model: str) -> None:
        if model != name:
            what = f"the model {model!r:.80} is not served here, {name} is"
            raise RequestError(what, 404, param="model", code="model_not_found")

    async def answer(
        request: Request,
        kind: type[ChatRequest] | type[Completion] | type[ResponseRequest],
        form_of: Callable[..., TextForm],
        begin: Callable[..., Answers],
    ) -> Response:
        body = await _body_of(request, 1000 * settings.max_body_kb, settings.timeout)
        events, loop = Events(), asyncio.get_running_loop()
        fields = await loop.run_in_executor(reader, parsed, kind, body, request.headers)
        check_model(fields.model)

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        answers = await run_in_threadpool(begin, fields, put)
        form = form_of(name, fields, answers)
        if fields.stream:
            return EventStream(form, events, settings.timeout, fields.ignored)
        return await whole(form, events, request.receive, fields.ignored)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, ChatRequest, ChatForm, service.chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, Completion, TextForm, service.completion)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer(request, ResponseRequest, ResponseForm, service.chat)

    @app.delete("/v1/sessions/{session}")
    async def forget(session: str) -> Response:
        await run_in_threadpool(service.sessions.forget, session)
        return JSONResponse({"id": session, "object": "session.deleted", "deleted": True})

    @app.post("/v1/sessions/{session}/stop")
    async def stop(session: str) -> Response:
        service.end_answer(session)
        return JSONResponse({"id": session, "object": "session.stopped"})

    @app.api_route("/v1/sessions/{session}/cache", methods=_READ)
    async def cache(request: Request, session: str) -> Response:
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit()):
            raise RequestError(
                f"since must be a number of tokens, got {since!r:.80}", param="since"
            )
        return JSONResponse(await run_in_threadpool(cache_view.view, service, session, int(since)))

    @app.post("/v1/readability")
    async def readability(request: Request) -> Response:
        body = await _body_of(request, 1000 * settings.max_body_kb, settings.timeout)
        return JSONResponse({"chunks": await run_in_threadpool(_judged, body)})

    model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "kvalign"}
    model["kvalign"] = cache_view.about(service)
    if beside is not None:
        model["kvalign"]["beside"] = cache_view.about(beside.state.service)
        app.mount("/beside", beside)

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.api_route("/v1/models/{model_id:path}", methods=_READ)
    async def one_model(model_id: str) -> Response:
        check_model(model_id)
        return JSONResponse(model)

    page = (
        None
        if settings.no_page or engine
        else rendered("serve", ["serve.js"], fields=FIELDS, kinds=KINDS)
    )

    @app.api_route("/", methods=_READ)
    @app.api_route("/v1", methods=_READ)
    async def about(request: Request) -> Response:
        if page is not None and _is_for_page(request.headers, request.url.path):
            return Response(page, media_type="text/html", headers=OF_PAGE)
        lines = [f"{name}, served by kvalign. Addresses:", *sorted({*paths} - {"/", "/v1"}), ""]
        return Response("\n".join(lines), media_type="text/plain")

    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        is_well = service.engine.is_alive()
        return JSONResponse({"status": "ok" if is_well else "stopped"}, 200 if is_well else 503)

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    paths = [getattr(route, "path", "") for route in app.routes]
    for kind in (RequestError, UserError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_to)
    if engine is not None:
        return app
    origins = [name.lower() for name in settings.allowed_origins or ()]
    app.add_middleware(
        Guard,
        api_key=settings.api_key,
        allowed_hosts=[name.lower() for name in settings.allowed_hosts or ()],
        allowed_origins=origins,
        paths=paths,
        has_page=page is not None,
        metrics=service.metrics,
    )
    if origins:  # browsers ask before they send, and want to read that they may
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=HEADERS,
        )
    return app


def serve(settings: ServeSettings, app: FastAPI, at: socket.socket, url: str) -> None:
    """Serve what `build` made of the settings, until Ctrl-C."""
    service: Service = app.state.service
    note = f", {len(service.sessions)} sessions in {settings.sessions}" if settings.sessions else ""
    page = "" if settings.no_page else f"a page: {url}/; "
    for one in service.sessions.store.notes:
        print(f"not changed: {one}", file=sys.stderr)
    print(
        f"{service.method.spec.name} with {service.method.in_words}{note}"
        f"{of_template(service.tokenizer)}: {url}/v1 ({page}Ctrl-C ends it)",
        flush=True,
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
    )
    gc.freeze()  # the model and its modules stay: collections would look through them each time
    try:
        _Server(config, service).run([at])
    except KeyboardInterrupt:
        print(file=sys.stderr)


class _Server(uvicorn.Server):
    """Server that ends its answers before it waits for their connections."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await run_in_threadpool(self.service.stop)
        await super().shutdown(sockets)


def _judged(body: bytes) -> list[list[int]]:
    """Chunks of the `text` of a body, by the paper's rule: start, end, whether it is readable."""
    try:
        from kvalign.eval.judging import RULES, load_words
        from kvalign.eval.judging.chunks import chunks
    except ImportError:
        raise RequestError("this needs the extra eval: pip install kvalign[eval]", 501) from None
    try:
        text = read_json(body.decode())["text"]
        parts = chunks(text, load_words(), RULES["paper"])
    except (ValueError, KeyError, TypeError):
        raise RequestError('the body must be {"text": "..."}', param="text") from None
    return [[part.start, part.end, int(part.is_readable)] for part in parts]


async def _body_of(request: Request, most_bytes: int, timeout: float) -> bytes:
    """The body of a request; RequestError if it is not JSON, too large or late."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"the body must be application/json, not {kind!r:.80}", 415)
    too_large = RequestError(f"a body has at most {most_bytes} bytes", 413, code="body_too_large")
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
        raise RequestError(f"no body came within {timeout:g} s", 408, code="timeout") from None
    return bytes(body)


async def _answer_to(request: Request, error: Exception) -> Response:
    match error:
        case RequestError():
            return error.response()
        case UserError():
            return RequestError(str(error)).response()
        case ClientDisconnect():
            return Response(status_code=_CLIENT_LEFT)
        case HTTPException():
            what = {404: "no such address", 405: "this address needs another HTTP method"}
            message = f"{what.get(error.status_code, error.detail)}: {request.url.path!r:.80}"
            response = RequestError(message, error.status_code).response()
            response.headers.update(error.headers or {})
            return response
    return RequestError("an error of the server", 500, code="internal_error").response()


_OPEN = ("/health",)  # asks for no key, and neither does the page, which asks for it itself
FIELDS = (
    ("temperature", "Temperature", 0, 2, "any"),
    ("top_p", "Top-p", 0.01, 1, "any"),
    ("top_k", "Top-k", -1, 1_000_000, 1),
    ("min_p", "Min-p", 0, 1, "any"),
    ("repetition_penalty", "Repetition penalty", 0.1, 10, "any"),
    ("max_tokens", "Most tokens", 1, 1_000_000, 1),
    ("seed", "Seed (empty: random)", 0, 2**31, 1),
)
"""Fields of sampling of the page: name, label, least, most, step."""
KINDS = (
    ("sink", "one of the first tokens, never evicted"),
    ("window", "held"),
    ("evicted", "out of the cache"),
    ("in the memory", "out of the cache, and may be taken back"),
    ("taken back", "from the memory for one token, stronger by more heads"),
    ("new", "the last token, which is fed next"),
)
"""Kinds of cells of the page's strip, with what they mean."""
OF_PAGE = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"}


def _is_for_page(headers: Mapping[str, str], path: str) -> bool:
    """Return whether a browser asks for the page, and no client for the list of addresses."""
    return path == "/" and "text/html" in headers.get("accept", "")


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
    has_page: bool
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
            self._check(Request(scope).headers, scope["path"])
        except RequestError as error:
            await error.response()(scope, receive, counted)
            return
        await self.app(scope, receive, counted)

    def _check(self, headers: Mapping[str, str], path: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        origins = (f"http://{host.lower()}", f"https://{host.lower()}")
        if not self._may_be(host):
            what = f"the host {host!r:.80} is not allowed here: add it with --allowed-hosts"
            raise RequestError(what, 403, code="host_not_allowed")
        if origin is not None and origin.lower() not in (*origins, *self.allowed_origins):
            what = f"pages of {origin!r:.80} are not allowed here"
            raise RequestError(what, 403, code="origin_not_allowed")
        is_open = path in _OPEN or (self.has_page and _is_for_page(headers, path))
        if self.api_key is not None and not is_open:
            kind, _, key = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
            if kind.lower() != "bearer" or not is_right:
                what = "API key missing or wrong: send it as Authorization: Bearer KEY"
                raise RequestError(what, 401, code="invalid_api_key")

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
