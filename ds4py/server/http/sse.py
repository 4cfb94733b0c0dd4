"""Send a request's events to its client: as one reply, or as server-sent events.

Owns: when each frame goes out, what a client hears while it waits, and noticing that it is gone.
Refuses to know: what a frame looks like (`api`), who generates. Invariant: the request is cancelled
whenever the client stops listening, in every phase; an error before the first byte is an HTTP
status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.types import Receive, Send

from ds4py.server.api.reply import ResponseShape, comment
from ds4py.server.errors import describe, json_response
from ds4py.server.requests.events import Answer, Done, Prefilling, Queued, ReplyEvent, Started
from ds4py.server.requests.queue import RequestHandle

_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    # a proxy between must neither collect pieces nor compress them, which collects them as well
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx's own word for the same
]


@contextlib.asynccontextmanager
async def cancelled_when_gone(handle: RequestHandle, receive: Receive) -> AsyncIterator[None]:
    """Cancel a request as soon as its client disconnects, and when the block is left early.

    The request's body must have been read: what comes next on `receive` is the disconnect.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        handle.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        handle.cancel()  # of no effect on one that is done
        watcher.cancel()
        await asyncio.wait([watcher])


async def send_whole(handle: RequestHandle, reply: ResponseShape, send: Send) -> Done:
    """Wait for the end, then send one JSON reply.

    Raises:
        Exception: The request failed before its prompt was evaluated.
    """
    answer: Answer | None = None
    while not isinstance(event := await handle.next(), Done):
        if isinstance(event, Started):
            answer = Answer()  # also the second time, which takes back what came before
        elif answer is not None and not isinstance(event, Queued | Prefilling | None):
            answer.add(event)
    if event.error is not None and answer is None:
        raise event.error
    answer = answer or Answer()
    if event.finish != "tool_calls":
        answer.drop_calls()
    response = json_response(reply.whole(answer, event))
    await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
    return event


async def send_stream(
    handle: RequestHandle, reply: ResponseShape, send: Send, *, progress: bool, keepalive: float
) -> Done:
    """Send events as they come.

    Headers go out with the first event, or after `keepalive` seconds of silence; from then on a
    failure to evaluate the prompt is an SSE error event, after which nothing follows.

    Args:
        handle: Its events.
        reply: Their shapes.
        send: The client.
        progress: Tell in comments how much of the prompt is evaluated, whenever that is known.
        keepalive: Longest silence, in seconds.

    Returns:
        The end, also of a reply that failed after its headers were sent.

    Raises:
        Exception: The request failed before the headers were sent.
    """
    stream = _EventStream(handle, reply, send, keepalive)
    while not isinstance(event := await stream.next_event(), Started | Done):
        if progress and isinstance(event, Prefilling):
            await stream.write(comment(f"prefill {event.n_done}/{event.n_prompt}"))
    if isinstance(event, Done):
        await stream.fail(event)
        return event
    await stream.write(*reply.started(event))
    while not isinstance(event := await stream.next_event(), Done):
        # what was sent cannot be taken back, so a stream has no second `Started` to obey
        if not isinstance(event, Queued | Prefilling | Started):
            await stream.write(*reply.written(event))
    await stream.write(*reply.closing(event), more=False)
    return event


class _EventStream:
    """The SSE side of one reply; sends the headers before its first byte."""

    def __init__(self, handle: RequestHandle, reply: ResponseShape, send: Send, keepalive: float):
        self._handle = handle
        self._reply = reply
        self._send = send
        self._keepalive = keepalive
        self._clock = asyncio.get_running_loop().time
        self._wrote = self._clock()
        self._doing = "prefill"
        self._begun = False

    async def next_event(self) -> ReplyEvent:
        """Wait for the next event, and say something whenever the silence gets long.

        What the client does not see, such as progress that it did not ask for, is silence too.
        """
        while True:
            patience = max(0.0, self._wrote + self._keepalive - self._clock())
            event = await self._handle.next(patience)
            if event is None:
                await self.write(self._reply.keepalive(self._doing))
                continue
            self._doing = _activity(event)
            return event

    async def write(self, *frames: bytes, more: bool = True) -> None:
        """Send frames; `more=False` ends the reply."""
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send(
            {"type": "http.response.body", "body": b"".join(frames), "more_body": more}
        )
        self._wrote = self._clock()

    async def fail(self, done: Done) -> None:
        """Report a request that ended before its first text: as an event, or by raising."""
        error = done.error or RuntimeError("the request ended before it started")
        if not self._begun:
            raise error
        await self.write(self._reply.failure(describe(error)), more=False)


def _activity(event: ReplyEvent) -> str:
    """Return what a client hears in the silence that follows an event."""
    match event:
        case Queued(queue_position=position):
            return f"queued {position}"
        case Prefilling(n_done=n_done, n_prompt=n_prompt):
            return f"prefill {n_done}/{n_prompt}"
        case _:
            return "decode"
