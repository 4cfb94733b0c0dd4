"""The Starlette application: which path does what, and how every failure looks to a client.

Owns: routes, CORS, the border where exceptions become replies. Refuses to know: sockets, models,
threads. Invariant: whatever a handler raises before the reply began is answered with an OpenAI
error body and never with a traceback.
"""

from __future__ import annotations

import itertools
import logging
from typing import Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds4py.config import ServerConfig
from ds4py.contracts import Backend
from ds4py.errors import CancelledError, Ds4Error, RequestError
from ds4py.server.endpoint import Endpoint, Service, chat_dialect, completion_dialect
from ds4py.server.errors import error_response, json_response, unknown_endpoint
from ds4py.server.jobs import Jobs
from ds4py.server.prompts import TextStack
from ds4py.server.status import health_object, model_objects
from ds4py.server.work import Performer

_log = logging.getLogger(__name__)

_CORS: Final = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
]


def create_app(
    backend: Backend, text: TextStack, config: ServerConfig, *, n_sessions: int = 1
) -> Starlette:
    """Build the HTTP application.

    No thread runs before the first request. Whoever serves the application ends its threads by
    `jobs_of(app).close(deadline)`.

    Args:
        backend: Sessions of the model.
        text: Tokenizer and chat format of the same model.
        config: Limits, defaults, name.
        n_sessions: Requests that generate at once: as many as the backend has sessions.
    """
    performer = Performer(backend, text)
    jobs = Jobs(performer.perform, n_threads=n_sessions, max_queue=config.max_queue)
    service = Service(backend, text, config, jobs, itertools.count(1))

    async def health(_: Request) -> Response:
        state = backend.health()
        body = health_object(backend, config, state, jobs.load)
        return json_response(body, 200 if state.ready else 503)

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": model_objects(backend, config)})

    async def model(request: Request) -> Response:
        wanted = request.path_params["name"]
        for entry in model_objects(backend, config):
            if entry["id"] == wanted:
                return json_response(entry)
        raise unknown_endpoint()

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", Endpoint(service, chat_dialect), methods=["POST"]),
            Route("/v1/completions", Endpoint(service, completion_dialect), methods=["POST"]),
        ],
        middleware=[Middleware(_Border, cors=config.cors)],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.router.redirect_slashes = False
    app.state.jobs = jobs
    return app


def jobs_of(app: Starlette) -> Jobs:
    """Return the generation threads of an application made by `create_app`."""
    return cast("Jobs", app.state.jobs)


async def _no_such_route(_: Request, __: Exception) -> Response:
    return error_response(unknown_endpoint())


class _Border:
    """Outermost layer: CORS on everything, `OPTIONS`, and exceptions to replies."""

    def __init__(self, app: ASGIApp, *, cors: bool):
        self._app = app
        self._extra = _CORS if cors else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await error_response(error)(scope, receive, tracked)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
        elif scope["method"] == "HEAD":
            raise unknown_endpoint()
        else:
            await self._app(scope, receive, send)


def _report(error: Exception) -> None:
    if isinstance(error, RequestError | CancelledError):
        _log.debug("refused: %s", error)
    elif isinstance(error, Ds4Error):
        _log.warning("request failed: %s", error)
    else:
        _log.error("request failed", exc_info=error)
