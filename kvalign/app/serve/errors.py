"""Errors of requests, in the form of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

from kvalign.foundation.errors import escape_controls

_LONGEST = 500  # characters of what is said
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


class RequestError(Exception):
    """Error of one request; the others go on.

    `param` is the field, `code` a word for programs.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def form(self) -> dict[str, Any]:
        """`{"error": ...}`, as JSON values."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": escape_controls(self.message)[:_LONGEST],
                "type": _TYPES.get(self.status, kind),
                "param": self.param and escape_controls(self.param)[:_LONGEST],
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.form(), self.status, _HEADERS.get(self.status))
