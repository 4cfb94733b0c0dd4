"""The Starlette application: which path does what.

Owns: routes, and which parts of the server they share. Refuses to know: sockets, models, threads.
Invariant: no path or method outside the table does anything but answer 404.
"""

from __future__ import annotations

import functools
import itertools
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ds4py.config import ServerConfig
from ds4py.contracts import Backend
from ds4py.generation.grammar import GrammarSource
from ds4py.server.api.chat.prepare import prepare_chat
from ds4py.server.api.completions.prepare import prepare_completion
from ds4py.server.api.messages.prepare import count_tokens, prepare_messages
from ds4py.server.api.prepared import Prepare, Service
from ds4py.server.api.responses.prepare import prepare_responses
from ds4py.server.console import console_routes
from ds4py.server.errors import error_response, json_response, unknown_endpoint
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.history.exact_tokens import ExactTokens
from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.http.admission import AdmissionControl
from ds4py.server.http.endpoint import Counter, Endpoint
from ds4py.server.http.middleware import FrontMiddleware
from ds4py.server.observability.console_stats import ConsoleStats, Watched
from ds4py.server.observability.event_log import EventLog
from ds4py.server.observability.health import health_object, model_objects, served_name
from ds4py.server.observability.metrics import Metrics, metrics_response
from ds4py.server.observability.request_metrics import RequestMetrics
from ds4py.server.requests.prompts import TextStack
from ds4py.server.requests.queue import RequestQueue
from ds4py.server.requests.worker import GenerationWorker
from ds4py.snapshot.disk_cache import DiskCache


def create_app(
    backend: Backend,
    text: TextStack,
    config: ServerConfig,
    *,
    n_sessions: int = 1,
    events: EventLog | None = None,
    disk: DiskCache | None = None,
) -> Starlette:
    """Build the HTTP application.

    No thread runs before the first request. Anyone who serves the application ends its threads by
    `queue_of(app).close(deadline)`.

    Args:
        backend: Sessions of the model.
        text: Tokenizer and chat format of the same model.
        config: Limits, defaults, name.
        n_sessions: Requests that generate at once: as many as the backend has sessions.
        events: The latest lines of the log, filled by the server.
        disk: Where prefixes outlive their sessions; None keeps none.
    """
    tools, exact_tokens = ToolCallMemory(max_ids=config.max_tool_ids), ExactTokens()
    disk_prefixes = None
    if disk is not None:
        disk_prefixes = DiskPrefixCache(disk, text.tokenizer, tools, exact_tokens)
    performer = GenerationWorker(backend, text, tools, exact_tokens, disk_prefixes)
    queue = RequestQueue(performer.perform, n_threads=n_sessions, max_queue=config.max_queue)
    service = Service(
        backend,
        text,
        config,
        queue,
        itertools.count(1),
        tools=tools,
        grammars=GrammarSource(text.tokenizer),
        pending_tools=PendingTools(),
        metrics=RequestMetrics(),
        exact_tokens=exact_tokens,
        admission=AdmissionControl(
            max_requests=n_sessions + config.max_queue, max_body_bytes=config.max_body_bytes
        ),
        disk_prefixes=disk_prefixes,
    )
    app = Starlette(
        routes=[
            *_about(service),
            *_figures(service, n_sessions, events or EventLog()),
            *_generating(service),
            *console_routes(),
        ],
        middleware=[Middleware(FrontMiddleware, cors=config.cors, api_key=config.api_key)],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.router.redirect_slashes = False
    app.state.jobs = queue
    app.state.save = functools.partial(performer.save_all, n_sessions)
    return app


def _generating(service: Service) -> list[Route]:
    """Return the routes that make the model work."""
    dialects: dict[str, Prepare] = {
        "/v1/chat/completions": prepare_chat,
        "/v1/completions": prepare_completion,
        "/v1/responses": prepare_responses,
        "/v1/messages": prepare_messages,
    }
    endpoints: dict[str, ASGIApp] = {
        path: Endpoint(service, dialect) for path, dialect in dialects.items()
    }
    endpoints["/v1/messages/count_tokens"] = Counter(service, count_tokens)
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


def _about(service: Service) -> list[Route]:
    """Return the routes that tell what is served."""
    backend, config = service.backend, service.config

    async def health(_: Request) -> Response:
        state = backend.health()
        body = health_object(backend, config, state, service.queue.load)
        return json_response(body, 200 if state.ready else 503)

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": model_objects(backend, config)})

    async def model(request: Request) -> Response:
        wanted = request.path_params["name"]
        for entry in model_objects(backend, config):
            if entry["id"] == wanted:
                return json_response(entry)
        raise unknown_endpoint()

    return [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def _figures(service: Service, n_sessions: int, events: EventLog) -> list[Route]:
    """Return the routes that tell what the server measures."""
    watched = Watched(
        backend=service.backend,
        meter=service.metrics,
        load=lambda: service.queue.load,
        n_sessions=n_sessions,
        name=served_name(service.backend.card, service.config),
    )
    numbers, series = ConsoleStats(watched, events), Metrics(watched)

    async def stats(_: Request) -> Response:
        return json_response(numbers.object())

    async def metrics(_: Request) -> Response:
        return metrics_response(series)

    return [Route("/stats", stats), Route("/metrics", metrics)]


def queue_of(app: Starlette) -> RequestQueue:
    """Return the generation threads of an application made by `create_app`."""
    return cast("RequestQueue", app.state.jobs)


def save_sessions(app: Starlette) -> None:
    """Save what the sessions of an application hold; its jobs must have ended."""
    app.state.save()


async def _no_such_route(_: Request, __: Exception) -> Response:
    return error_response(unknown_endpoint())
