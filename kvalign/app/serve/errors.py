"""What is answered to a request that cannot be served, in the form of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

from kvalign.foundation.escape import escape_controls

_LONGEST = 500  # characters of what is said


class RequestError(Exception):
    """Something about one request; the others go on.

    Args:
        message: what came, what was needed, what to do.
        status: of HTTP.
        kind: the `type` of the form.
        param: the field that is meant.
        code: a word for programs.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code = param, code

    def form(self) -> dict[str, Any]:
        """`{"error": ...}`, as JSON can hold it."""
        param = self.param and escape_controls(self.param)[:_LONGEST]
        of_form = {"type": self.kind, "param": param, "code": self.code}
        return {"error": {"message": escape_controls(self.message)[:_LONGEST], **of_form}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else None
        if self.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        return JSONResponse(self.form(), self.status, headers)


def too_busy(message: str) -> RequestError:
    return RequestError(message, 429, kind="rate_limit_error", code="rate_limit_exceeded")


def failed(message: str, code: str = "stream_failed", status: int = 500) -> RequestError:
    return RequestError(message, status, kind="server_error", code=code)
