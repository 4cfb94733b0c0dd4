"""The life of one generating request, whatever its dialect.

Owns: the order of steps (read, check, tokenize, queue, deliver), the request body's limits, ids,
and the log line at the end. Refuses to know: fields and shapes of a dialect. Invariant: a request
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
from ds4py.contracts import Backend
from ds4py.errors import CancelledError, RequestError
from ds4py.server.deliver import cancelled_when_gone, send_stream, send_whole
from ds4py.server.jobs import Job, Jobs
from ds4py.server.openai import ChatReply, CompletionReply, Reply, rate
from ds4py.server.prompts import TextStack, chat_prompt, check_fits, completion_prompt
from ds4py.server.schema import Options, read_chat, read_completion
from ds4py.server.status import served_name
from ds4py.server.work import Done, Order

_log = logging.getLogger(__name__)

READ_SECONDS: Final = 10.0
"""Silence in the middle of a request body after which it is given up."""

DISCARD_SECONDS: Final = 5.0
"""Time for which the rest of a body that is too large is read and thrown away."""


@dataclass(frozen=True, slots=True)
class Service:
    """What all generating endpoints share.

    Args:
        backend: Sessions of the model.
        text: Tokenizer and chat template.
        config: Limits and defaults.
        jobs: Generation threads.
        numbers: Source of reply ids.
    """

    backend: Backend
    text: TextStack
    config: ServerConfig
    jobs: Jobs
    numbers: Iterator[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request.

    Args:
        prompt: Token ids.
        options: What it says about its answer.
        reply: Makes the shapes from (number, unix time, model name).
        thinking: The prompt opened the reasoning, which the dialect returns apart.
        calls: The dialect returns calls of tools apart.
    """

    prompt: tuple[int, ...]
    options: Options
    reply: Callable[[int, int, str], Reply]
    thinking: bool = False
    calls: bool = False


Dialect = Callable[[Service, bytes], Plan]
"""Checks a body and makes its prompt; runs on a helper thread, raises `RequestError`."""


def chat_dialect(service: Service, body: bytes) -> Plan:
    """Read `/v1/chat/completions`."""
    asked = read_chat(body, service.config.sampling)
    prompt = chat_prompt(
        service.text,
        asked.messages,
        think=asked.options.think,
        tools=asked.tools,
        default_system=asked.default_system,
    )
    check_fits(prompt, service.backend.n_ctx, param="messages")
    chat = service.text.chat
    return Plan(
        prompt,
        asked.options,
        lambda n, at, name: ChatReply(f"chatcmpl-{n}", at, name),
        thinking=chat.opens_reasoning(prompt),
        calls=bool(asked.tools) and chat.writes_calls,
    )


def completion_dialect(service: Service, body: bytes) -> Plan:
    """Read `/v1/completions`, whose text keeps the reasoning and the tag that ends it."""
    asked = read_completion(body, service.config.sampling)
    prompt = completion_prompt(
        service.text,
        service.backend.card,
        asked.prompt,
        think=asked.options.think,
        raw=asked.raw,
    )
    check_fits(prompt, service.backend.n_ctx, param="prompt")
    return Plan(prompt, asked.options, lambda n, at, name: CompletionReply(f"cmpl-{n}", at, name))


class Endpoint:
    """One POST route that generates (an ASGI application)."""

    def __init__(self, service: Service, dialect: Dialect):
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; raises what the application's border turns into a reply."""
        service = self._service
        body = await read_body(Request(scope, receive), service.config.max_body_bytes)
        # reading and tokenizing a long prompt takes seconds: not on the event loop
        plan = await asyncio.to_thread(self._dialect, service, body)
        name = plan.options.model or served_name(service.backend.card, service.config)
        reply = plan.reply(next(service.numbers), int(time.time()), name)
        job = service.jobs.submit(_order(service, plan))
        try:
            done = await self._deliver(job, reply, plan.options, receive, send)
        except Exception as error:
            _log_end(reply.id, scope["path"], Done(finish="error", error=error))
            raise
        _log_end(reply.id, scope["path"], done)

    async def _deliver(
        self, job: Job, reply: Reply, options: Options, receive: Receive, send: Send
    ) -> Done:
        async with cancelled_when_gone(job, receive):
            if not options.stream:
                return await send_whole(job, reply, send)
            return await send_stream(
                job,
                reply,
                send,
                include_usage=options.include_usage,
                keepalive=self._service.config.keepalive_seconds,
            )


def _order(service: Service, plan: Plan) -> Order:
    wanted = plan.options.max_tokens
    budget = service.config.max_tokens if wanted is None else wanted
    return Order(
        prompt=plan.prompt,
        sampling=plan.options.sampling,
        stop=plan.options.stop,
        max_tokens=min(budget, service.backend.n_ctx - len(plan.prompt)),
        thinking=plan.thinking,
        calls=plan.calls,
        token_ids=plan.options.token_ids,
        progress=plan.options.progress,
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


async def read_body(request: Request, limit: int) -> bytes:
    """Read a whole request body.

    Args:
        request: Nothing of its body may have been read.
        limit: Most bytes.

    Raises:
        RequestError: 413 for more than `limit` bytes, 400 for a body that stalls.
        CancelledError: The client is gone.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        if "expect" not in request.headers:  # else the client waits for a word before it sends
            await _discard(request.receive)
        raise _too_large(f"{declared[:20]} bytes", limit)
    parts: list[bytes] = []
    total, more = 0, True
    while more:
        message = await _receive(request.receive)
        part = message.get("body", b"")
        total, more = total + len(part), message.get("more_body", False)
        if total > limit:
            await _discard(request.receive, more=more)
            raise _too_large(f"more than {limit} bytes", limit)
        parts.append(part)
    return b"".join(parts)


async def _receive(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(READ_SECONDS):
            message = await receive()
    except TimeoutError as error:
        raise RequestError(
            f"bad HTTP request: the body stopped for {READ_SECONDS:.0f} s before its end"
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
