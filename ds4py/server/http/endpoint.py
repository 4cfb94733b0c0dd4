"""The life of one generating request, whatever its API.

Owns: the order of steps (read, check, tokenize, queue, deliver), the request body's limits, ids,
and the log line at the end. Refuses to know: members and shapes of an API. Invariant: a request
that is refused for what it says has neither touched a session nor entered the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ds4py.config import ServerConfig
from ds4py.errors import CancelledError, RequestError
from ds4py.generation.grammar import Constraint, GrammarSource
from ds4py.server.api.reply import NewResponse, ResponseShape, rate
from ds4py.server.errors import json_response
from ds4py.server.http.admission import AdmissionControl
from ds4py.server.http.sse import cancelled_when_gone, send_stream, send_whole
from ds4py.server.observability.request_metrics import RequestMeter, RequestMetrics
from ds4py.server.requests.events import Done
from ds4py.server.requests.prompts import PromptWriter
from ds4py.server.requests.queue import RequestHandle, RequestQueue
from ds4py.server.requests.request import GenerationRequest, OutputFormat
from ds4py.server.requests.state import RequestState

_log = logging.getLogger(__name__)

READ_SECONDS: Final = 10.0
"""Silence in the middle of a request body after which it is given up."""

BODY_SECONDS: Final = 600.0
"""Time for a whole request body, however steadily it comes."""

DISCARD_SECONDS: Final = 5.0
"""Time for which the rest of a body that is too large is read and thrown away."""


ReadRequest = Callable[[bytes], GenerationRequest]
"""Checks a body; runs on a helper thread, raises `RequestError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all generating endpoints share.

    Args:
        model: Name of the served model.
        config: Limits and defaults.
        prompts: Writes for the model.
        grammars: Makes constraints for the vocabulary of the model.
        queue: Generation threads.
        numbers: Source of reply ids.
        metrics: Counts requests.
        admission: Lets requests in.
    """

    model: str
    config: ServerConfig
    prompts: PromptWriter
    grammars: GrammarSource
    queue: RequestQueue
    numbers: Iterator[int]
    metrics: RequestMetrics
    admission: AdmissionControl


class Endpoint:
    """One POST route that generates (an ASGI application).

    Args:
        service: Of the server.
        read: Body to request, of the route's API.
        respond: Request to response, of the same API.
    """

    def __init__(self, service: Service, read: ReadRequest, respond: NewResponse):
        self._service = service
        self._read = read
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; raises what the application's border turns into a reply."""
        service = self._service
        meter = service.metrics.accepted(scope["path"])
        try:
            with service.admission.admitted() as take:
                body = await read_body(Request(scope, receive), service.config.max_body_bytes, take)
                # reading and tokenizing a long prompt takes seconds: not on the event loop
                state = await service.admission.helped(self._prepare, body, meter)
                del body  # may be large, and the reply takes long
                done = await self._serve(state, scope["path"], receive, send)
        except BaseException as error:
            meter.failed(error)
            raise
        meter.finished(done.finish, done.error)

    def _prepare(self, body: bytes, meter: RequestMeter) -> RequestState:
        """Read a body and write its prompt (on a helper thread).

        Whatever can be refused is refused here, before the queue: the grammar is compiled, too.
        """
        service = self._service
        request = self._read(body)
        prompt = service.prompts.write(request)
        constraint = _constraint(service.grammars, request.output_format)
        limit = service.config.request_seconds
        return RequestState(
            request=request,
            prompt=prompt,
            constraint=constraint,
            deadline=None if limit is None else time.monotonic() + limit,
            meter=meter,
        )

    async def _serve(self, state: RequestState, path: str, receive: Receive, send: Send) -> Done:
        service, request = self._service, state.request
        reply = self._respond(
            request,
            number=next(service.numbers),
            created=int(time.time()),
            model=request.model or service.model,
        )
        state.meter.queued()  # first: a generation thread may take it before `submit` returns
        handle = service.queue.submit(state)
        try:
            done = await self._deliver(handle, request, reply, receive, send)
        except Exception as error:
            _log_end(reply.id, path, Done(finish="error", error=error))
            raise
        _log_end(reply.id, path, done)
        return done

    async def _deliver(
        self,
        handle: RequestHandle,
        request: GenerationRequest,
        reply: ResponseShape,
        receive: Receive,
        send: Send,
    ) -> Done:
        async with cancelled_when_gone(handle, receive):
            if not request.stream:
                return await send_whole(handle, reply, send)
            return await send_stream(
                handle,
                reply,
                send,
                progress=request.progress,
                keepalive=self._service.config.keepalive_seconds,
            )


class Counter:
    """One POST route that only counts the tokens of a prompt (an ASGI application).

    Args:
        service: Of the server.
        read: Body to request, of an API whose prompts are conversations.
    """

    def __init__(self, service: Service, read: ReadRequest):
        self._service = service
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; raises as `Endpoint`."""
        service = self._service
        with service.admission.admitted() as take:
            body = await read_body(Request(scope, receive), service.config.max_body_bytes, take)
            n_tokens = await service.admission.helped(self._count, body)
        await json_response({"input_tokens": n_tokens})(scope, receive, send)

    def _count(self, body: bytes) -> int:
        return self._service.prompts.count(self._read(body))


def _constraint(grammars: GrammarSource, wanted: OutputFormat | None) -> Constraint | None:
    """Compile the grammar of a request's answer."""
    if wanted is None:
        return None
    return grammars.compile(wanted.kind, wanted.text, lenient=not wanted.strict)


def _log_end(name: str, path: str, done: Done) -> None:
    tally = done.tally
    _log.info(
        "%s %s: prompt %d (cached %d), %.1f t/s; completion %d, %.1f t/s; finish %s%s",
        name,
        path,
        tally.n_prompt,
        tally.n_cached,
        rate(tally.n_prompt - tally.n_cached, tally.prefill_seconds),
        tally.n_completion,
        rate(tally.n_completion, tally.decode_seconds),
        done.finish,
        f": {done.error}" if done.error else "",
    )


async def read_body(request: Request, limit: int, take: Callable[[int], None]) -> bytes:
    """Read a whole request body.

    Args:
        request: Nothing of its body may have been read.
        limit: Most bytes.
        take: Told of further bytes; may refuse them.

    Raises:
        RequestError: 413 for more than `limit` bytes, 400 for a body that stalls or takes too long.
        CancelledError: The client is gone.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        if "expect" not in request.headers:  # else the client waits for a word before it sends
            await _discard(request.receive)
        raise _too_large(f"{declared[:20]} bytes", limit)
    parts: list[bytes] = []
    total, more = 0, True
    end = time.monotonic() + BODY_SECONDS
    while more:
        message = await _receive(request.receive, end)
        part = message.get("body", b"")
        total, more = total + len(part), message.get("more_body", False)
        if total > limit:
            await _discard(request.receive, more=more)
            raise _too_large(f"more than {limit} bytes", limit)
        take(len(part))
        parts.append(part)
    return b"".join(parts)


async def _receive(receive: Receive, end: float) -> Message:
    try:
        async with asyncio.timeout(min(READ_SECONDS, end - time.monotonic())):
            message = await receive()
    except TimeoutError as error:
        raise RequestError(
            f"bad HTTP request: the body stopped for {READ_SECONDS:.0f} s before its end, "
            f"or was not complete after {BODY_SECONDS:.0f} s"
        ) from error
    if message["type"] == "http.disconnect":
        raise CancelledError("the client is gone")
    return message


async def _discard(receive: Receive, *, more: bool = True) -> None:
    """Read on for a while, so that the refusal is not lost in a connection reset."""
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while more:
                more = (await receive()).get("more_body", False)
    except TimeoutError:
        return


def _too_large(got: str, limit: int) -> RequestError:
    return RequestError(
        f"request body: got {got}, expected at most {limit}",
        status=413,
        code="request_too_large",
    )
