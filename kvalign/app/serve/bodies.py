"""Body of a request: its bytes as they arrive, and the JSON in them, both within limits.

A megabyte of `{},` is 300 000 objects. Making them takes long and a hundred times the memory.
"""

import asyncio
import json
from typing import Any

from starlette.requests import Request

from kvalign.app.serve.errors import RequestError


async def body_of(request: Request, most_bytes: int, timeout: float) -> bytes:
    """The body of a request; RequestError if it is not JSON, too large or late."""
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
            f"the body did not arrive within {timeout:g} seconds", 408, code="timeout"
        ) from None
    return bytes(body)


def values_of(body: bytes, most_values: int) -> Any:
    """The values in a body; RequestError if it is not JSON or has too many of them."""
    if _num_marks(body) > most_values and _num_marks(_without_texts(body)) > most_values:
        raise RequestError(
            f"the body has too many values, more than {most_values}: send less at once, or "
            "serve with a larger --max-prompt-tokens",
            code="body_too_large",
        )
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _num_marks(body: bytes) -> int:
    """Places where a value begins: after a bracket, a brace or a comma."""
    return sum(map(body.count, (b"{", b"[", b",")))


def _without_texts(body: bytes) -> bytes:
    """Return the part of a body outside its texts; if there are very many texts, these too."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > len(body) // 8:
        return body
    return b"".join(plain.split(b'"')[::2])
