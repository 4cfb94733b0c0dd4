"""Errors as HTTP clients read them.

Owns: which status, type and code an exception gets, and the error bodies of both families of
APIs. Refuses to know: routes, streams. Invariant: only messages that ds4py wrote for people
leave the process; everything else becomes one fixed sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.responses import Response

from ds4py.errors import CancelledError, CapacityError, Ds4Error, RequestError, RouteIncompleteError

SHUTTING_DOWN: Final = "server shutting down"
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error, ready to be sent.

    Args:
        status: HTTP status, used while no byte has been sent.
        message: One sentence for people.
        code: Machine-readable word.
        param: Offending request field.
        extra: Further JSON members of the error object.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    extra: dict[str, int] = field(default_factory=dict)

    def body(self, *, in_stream: bool = False) -> dict[str, object]:
        """Return the `error` object of the OpenAI APIs.

        The type is one word for every status, as in ds4; in a stream, where there is no status, it
        is another (docs/spec/server-and-cli.md#errors).
        """
        return {
            "message": self.message,
            "type": "server_error" if in_stream else "invalid_request_error",
            "param": self.param,
            "code": self.code,
            **self.extra,
        }

    def anthropic(self) -> dict[str, object]:
        """Return the whole body of the Anthropic API, which is also its stream's event."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        message = self.message
        if self.extra.keys() >= {"n_prompt_tokens", "n_ctx"}:
            # the words on which Claude Code compacts; its maximum is what would have fitted
            got, most = self.extra["n_prompt_tokens"], self.extra["n_ctx"] - 1
            message += f" (prompt is too long: {got} tokens > {most} maximum)"
        return {"type": "error", "error": {"type": kind, "message": message, **self.extra}}


def unknown_endpoint() -> RequestError:
    """Return the error of a path or method that does not exist."""
    return RequestError("unknown endpoint", status=404)


def shutting_down() -> RequestError:
    """Return the error of requests that come or run while the server stops."""
    return RequestError(SHUTTING_DOWN, status=503, code="shutting_down")


def describe(error: BaseException) -> Problem:
    """Choose what a client learns about an exception."""
    match error:
        case RequestError():
            return Problem(
                status=error.status,
                message=error.message,
                code=error.code,
                param=error.param,
                extra=error.extra,
            )
        case RouteIncompleteError():
            return Problem(status=503, message=str(error), code="route_incomplete")
        case CapacityError():
            return Problem(status=503, message=str(error), code="capacity_exhausted")
        case CancelledError():
            return Problem(status=503, message=str(error) or SHUTTING_DOWN, code="cancelled")
        case Ds4Error():
            return Problem(status=500, message=str(error))
        case _:
            return Problem(status=500, message="internal error; the server's log has the details")


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON reply whose body ends with one newline (server-and-cli.md#transport)."""
    return Response(
        msgspec.json.encode(content) + b"\n",
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def error_response(error: BaseException, *, anthropic: bool = False) -> Response:
    """Return the HTTP reply for an exception.

    Args:
        error: What happened.
        anthropic: The client uses that API.
    """
    problem = describe(error)
    # a queue, a missing worker: states that pass
    headers = {"Retry-After": "1"} if problem.status in (429, 503) else None
    body = problem.anthropic() if anthropic else {"error": problem.body()}
    return json_response(body, problem.status, headers)
