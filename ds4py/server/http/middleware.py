"""The outermost layer of the application: who comes in, and how every failure looks outside.

Owns: CORS, `OPTIONS`, the API key, exceptions to replies. Refuses to know: routes, models, threads.
Invariant: whatever is raised before a reply began is answered with an error body of the client's
API, never with a traceback; a wrong key costs as long to refuse as a right one to accept.
"""

from __future__ import annotations

import hmac
import logging
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds4py.errors import CancelledError, Ds4Error, RequestError
from ds4py.server.errors import error_response, unknown_endpoint

_log = logging.getLogger(__name__)

_CORS: Final = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
]
_ANTHROPIC: Final = "/v1/messages"
_OPEN: Final = frozenset({"/", "/health"})
"""Paths that need no key: what a load balancer asks, and a page that holds nothing."""
_OPEN_PREFIX: Final = "/console/"


class FrontMiddleware:
    """See the module.

    Args:
        app: Everything else.
        cors: Let browsers of other origins in.
        api_key: What clients must name; None lets everybody in.
    """

    def __init__(self, app: ASGIApp, *, cors: bool, api_key: str | None):
        self._app = app
        self._extra = _CORS if cors else []
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *self._extra]
            await send(message)

        try:
            await self._answer(scope, receive, tracked)
        except Exception as error:  # the border to the outside: nothing may pass it
            _report(error)
            if started:
                raise  # the server below closes the connection
            anthropic = scope["path"].startswith(_ANTHROPIC)
            await error_response(error, anthropic=anthropic)(scope, receive, tracked)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            raise unknown_endpoint()
        self._check_key(scope)
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]  # the one that is routed; a URL is built with what `Host` says
        if self._key is None or path in _OPEN or path.startswith(_OPEN_PREFIX):
            return
        if not hmac.compare_digest(_named_key(Request(scope)), self._key):
            raise RequestError(
                "no valid API key: got none or a wrong one, expected the server's in "
                "`Authorization: Bearer KEY` or `x-api-key: KEY`",
                status=401,
                code="invalid_api_key",
            )


def _named_key(request: Request) -> bytes:
    """Return the key that a client names, in the way of either family of APIs."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip().encode("latin-1", "replace")
    return request.headers.get("x-api-key", "").encode("latin-1", "replace")


def _report(error: Exception) -> None:
    if isinstance(error, RequestError | CancelledError):
        _log.debug("refused: %a", str(error))  # may hold what a client said
    elif isinstance(error, Ds4Error):
        _log.warning("request failed: %s", error)
    else:
        _log.error("request failed", exc_info=error)
