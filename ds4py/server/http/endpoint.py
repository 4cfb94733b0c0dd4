"""The life of one generating request, whatever its dialect.

Owns: the order of steps (read, check, tokenize, queue, deliver), the request body's limits, ids,
and the log line at the end. Refuses to know: fields and shapes of a dialect. Invariant: a request
that is refused for what it says has neither touched a session nor entered the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ds4py.config import SamplingParams
from ds4py.errors import CancelledError, RequestError
from ds4py.server.api.prepared import Prepare, PreparedRequest, Service
from ds4py.server.api.reply import ResponseShape, rate
from ds4py.server.errors import json_response
from ds4py.server.http.sse import cancelled_when_gone, send_stream, send_whole
from ds4py.server.observability.health import served_name
from ds4py.server.observability.request_metrics import RequestMeter
from ds4py.server.requests.events import Done
from ds4py.server.requests.queue import RequestHandle
from ds4py.server.requests.request import GenerationRequest

_log = logging.getLogger(__name__)

READ_SECONDS: Final = 10.0
"""Silence in the middle of a request body after which it is given up."""

BODY_SECONDS: Final = 600.0
"""Time for a whole request body, however steadily it comes."""

DISCARD_SECONDS: Final = 5.0
"""Time for which the rest of a body that is too large is read and thrown away."""


_DS4_SAMPLING: Final = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05)
"""Of ds4 while its model reasons, whatever a request says (server-and-cli.md#sampling)."""


class Endpoint:
    """One POST route that generates (an ASGI application)."""

    def __init__(self, service: Service, prepare: Prepare):
        self._service = service
        self._prepare = prepare
        self._limit = service.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; raises what the application's border turns into a reply."""
        meter = self._service.metrics.accepted(scope["path"])
        try:
            with self._service.admission.admitted() as take:
                body = await read_body(Request(scope, receive), self._limit, take)
                # reading and tokenizing a long prompt takes seconds: not on the event loop
                prepared = await self._service.admission.helped(self._prepare, self._service, body)
                del body  # may be large, and the reply takes long
                done = await self._serve(prepared, meter, scope, receive, send)
        except BaseException as error:
            meter.failed(error)
            raise
        meter.finished(done.finish, done.error)

    async def _serve(
        self,
        prepared: PreparedRequest,
        meter: RequestMeter,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> Done:
        service = self._service
        name = prepared.options.model or served_name(service.backend.card, service.config)
        reply = prepared.reply(next(service.numbers), int(time.time()), name)
        meter.queued()
        handle = service.queue.submit(_generation_request(service, prepared, meter))
        try:
            done = await self._deliver(handle, prepared, reply, receive, send)
        except Exception as error:
            _log_end(reply.id, scope["path"], Done(finish="error", error=error))
            raise
        _log_end(reply.id, scope["path"], done)
        return done

    async def _deliver(
        self,
        handle: RequestHandle,
        prepared: PreparedRequest,
        reply: ResponseShape,
        receive: Receive,
        send: Send,
    ) -> Done:
        async with cancelled_when_gone(handle, receive):
            if not prepared.options.stream:
                return await send_whole(handle, reply, send)
            return await send_stream(
                handle,
                reply,
                send,
                progress=prepared.options.progress,
                keepalive=self._service.config.keepalive_seconds,
            )


class Counter:
    """One POST route that only counts the tokens of a prompt (an ASGI application)."""

    def __init__(self, service: Service, count: Callable[[Service, bytes], int]):
        self._service = service
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; raises as `Endpoint`."""
        service = self._service
        with service.admission.admitted() as take:
            body = await read_body(Request(scope, receive), service.config.max_body_bytes, take)
            n_tokens = await service.admission.helped(self._count, service, body)
        await json_response({"input_tokens": n_tokens})(scope, receive, send)


def _generation_request(
    service: Service, prepared: PreparedRequest, meter: RequestMeter
) -> GenerationRequest:
    config, options = service.config, prepared.options
    wanted = config.max_tokens if options.max_tokens is None else options.max_tokens
    limit = config.request_seconds
    if config.compat_sampling and service.text.chat.opens_reasoning(prepared.prompt):
        options = replace(options, sampling=replace(_DS4_SAMPLING, seed=options.sampling.seed))
    return GenerationRequest(
        prompt=prepared.prompt,
        options=options,
        max_tokens=min(wanted, service.backend.n_ctx - len(prepared.prompt)),
        thinking=prepared.thinking,
        may_think=prepared.may_think,
        calls=prepared.calls,
        call_prefix=prepared.call_prefix,
        retry=None if options.stream or prepared.calls is None else prepared.retry,
        constraint=prepared.constraint,
        conclude=prepared.conclude,
        prefix_length=prepared.prefix_length,
        deadline=None if limit is None else time.monotonic() + limit,
        meter=meter,
    )


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
