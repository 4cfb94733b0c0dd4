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
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.chat.response import chat_response
from ds4py.server.api.completions.request import read_completion
from ds4py.server.api.completions.response import completion_response
from ds4py.server.api.messages.request import read_messages
from ds4py.server.api.messages.response import messages_response
from ds4py.server.api.responses.request import read_responses
from ds4py.server.api.responses.response import responses_response
from ds4py.server.console import console_routes
from ds4py.server.errors import error_response, json_response, unknown_endpoint
from ds4py.server.history.conversations import ConversationMemory
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.history.exact_tokens import ExactTokens
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.http.admission import AdmissionControl
from ds4py.server.http.endpoint import Counter, Endpoint, Service
from ds4py.server.http.middleware import FrontMiddleware
from ds4py.server.observability.console_stats import ConsoleStats, Watched
from ds4py.server.observability.event_log import EventLog
from ds4py.server.observability.health import health_object, model_objects, served_name
from ds4py.server.observability.metrics import Metrics, metrics_response
from ds4py.server.observability.request_metrics import RequestMetrics
from ds4py.server.requests.prompts import PromptWriter, TextStack
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
    memory = _memory(text, config, disk)
    prompts = PromptWriter(text, backend, config, memory)
    worker = GenerationWorker(backend, prompts, memory, compat_sampling=config.compat_sampling)
    queue = RequestQueue(worker.perform, n_threads=n_sessions, max_queue=config.max_queue)
    service = Service(
        model=served_name(backend.card, config),
        config=config,
        prompts=prompts,
        grammars=GrammarSource(text.tokenizer),
        queue=queue,
        numbers=itertools.count(1),
        metrics=RequestMetrics(),
        admission=AdmissionControl(
            max_requests=n_sessions + config.max_queue, max_body_bytes=config.max_body_bytes
        ),
    )
    watched = Watched(
        backend=backend,
        meter=service.metrics,
        load=lambda: service.queue.load,
        n_sessions=n_sessions,
        name=service.model,
    )
    app = Starlette(
        routes=[
            *_about(backend, service),
            *_figures(watched, events or EventLog()),
            *_generating(service, memory),
            *console_routes(),
        ],
        middleware=[Middleware(FrontMiddleware, cors=config.cors, api_key=config.api_key)],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.router.redirect_slashes = False
    app.state.queue = queue
    app.state.save = functools.partial(worker.save_all, n_sessions)
    return app


def _memory(text: TextStack, config: ServerConfig, disk: DiskCache | None) -> ConversationMemory:
    """Return what remembers conversations; at first they know nothing."""
    tools, exact_tokens = ToolCallMemory(max_ids=config.max_tool_ids), ExactTokens()
    disk_prefixes = None
    if disk is not None:
        disk_prefixes = DiskPrefixCache(disk, text.tokenizer, tools, exact_tokens)
    return ConversationMemory(
        tool_calls=tools, exact_tokens=exact_tokens, disk_prefixes=disk_prefixes
    )


def _generating(service: Service, memory: ConversationMemory) -> list[Route]:
    """Return the routes that make the model work: each reads and responds in its own way."""
    config, pending = service.config, memory.pending_tools
    chat = functools.partial(read_chat, config=config)
    completion = functools.partial(read_completion, config=config)
    messages = functools.partial(read_messages, config=config, pending=pending)
    responses = functools.partial(read_responses, config=config, pending=pending)
    endpoints: dict[str, ASGIApp] = {
        "/v1/chat/completions": Endpoint(service, chat, chat_response),
        "/v1/completions": Endpoint(service, completion, completion_response),
        "/v1/messages": Endpoint(service, messages, messages_response),
        "/v1/messages/count_tokens": Counter(service, messages),
        "/v1/responses": Endpoint(service, responses, responses_response),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


def _about(backend: Backend, service: Service) -> list[Route]:
    """Return the routes that tell what is served."""
    config = service.config

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


def _figures(watched: Watched, events: EventLog) -> list[Route]:
    """Return the routes that tell what the server measures."""
    numbers, series = ConsoleStats(watched, events), Metrics(watched)

    async def stats(_: Request) -> Response:
        return json_response(numbers.object())

    async def metrics(_: Request) -> Response:
        return metrics_response(series)

    return [Route("/stats", stats), Route("/metrics", metrics)]


def queue_of(app: Starlette) -> RequestQueue:
    """Return the generation threads of an application made by `create_app`."""
    return cast("RequestQueue", app.state.queue)


def save_sessions(app: Starlette) -> None:
    """Save what the sessions of an application hold; its requests must have ended."""
    app.state.save()


async def _no_such_route(_: Request, __: Exception) -> Response:
    return error_response(unknown_endpoint())
