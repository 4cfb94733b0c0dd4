"""Send a job's events to its client: as one reply, or as server-sent events.

Owns: when each chunk goes out, keepalive comments, and noticing that the client is gone. Refuses to
know: what a chunk looks like (`openai`), who generates. Invariant: the job is cancelled whenever
the client stops listening, in every phase; an error before the first byte is an HTTP status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from starlette.types import Receive, Send

from ds4py.server.errors import describe, json_response
from ds4py.server.jobs import Job
from ds4py.server.openai import Reply
from ds4py.server.work import Done, Event, Piece, Prefilling

_PREFILLING: Final = b": prefill\n\n"
_DECODING: Final = b": decode\n\n"
_END: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


@contextlib.asynccontextmanager
async def cancelled_when_gone(job: Job, receive: Receive) -> AsyncIterator[None]:
    """Cancel a job as soon as its client disconnects, and when the block is left early.

    The request's body must have been read: what comes next on `receive` is the disconnect.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        job.cancel()  # of no effect on a job that is done
        watcher.cancel()
        await asyncio.wait([watcher])


async def send_whole(job: Job, reply: Reply, send: Send) -> Done:
    """Wait for the end, then send one JSON reply.

    Raises:
        Exception: The job failed before its prompt was evaluated.
    """
    pieces: list[Piece] = []
    started = False
    while not isinstance(event := await job.next(), Done):
        started = started or not isinstance(event, Prefilling)
        if isinstance(event, Piece):
            pieces.append(event)
    if event.error is not None and not started:
        raise event.error
    response = json_response(reply.whole(_joined(pieces), event))
    await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
    return event


async def send_stream(
    job: Job, reply: Reply, send: Send, *, include_usage: bool, keepalive: float
) -> Done:
    """Send events as they come.

    Headers go out with the first event, or after `keepalive` seconds of silence; from then on a
    failure to evaluate the prompt is an SSE error event, after which nothing follows.

    Raises:
        Exception: The job failed before the headers were sent.
    """
    stream = _EventStream(job, send, keepalive)
    while isinstance(event := await stream.next_event(_PREFILLING), Prefilling):
        await stream.write(b": prefill %d/%d\n\n" % (event.n_done, event.n_prompt))
    if isinstance(event, Done):
        await stream.fail(event)
        return event
    if (opening := reply.opening()) is not None:
        await stream.chunk(opening)
    while not isinstance(event := await stream.next_event(_DECODING), Done):
        if isinstance(event, Piece):
            await stream.chunk(reply.piece(event))
    await stream.chunk(reply.closing(event))
    if include_usage:
        await stream.chunk(reply.usage(event))
    await stream.write(_END, more=False)
    return event


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=tuple(call for piece in pieces for call in piece.calls),
    )


class _EventStream:
    """The SSE side of one reply; sends the headers before its first byte."""

    def __init__(self, job: Job, send: Send, keepalive: float):
        self._job = job
        self._send = send
        self._keepalive = keepalive
        self._started = False

    async def next_event(self, comment: bytes) -> Event:
        """Wait for the job's next event; write `comment` whenever the silence gets long."""
        while (event := await self._job.next(self._keepalive)) is None:
            await self.write(comment)
        return event

    async def chunk(self, content: object) -> None:
        """Send one `data:` line."""
        await self.write(b"data: " + msgspec.json.encode(content) + b"\n\n")

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send bytes; `more=False` ends the reply."""
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, done: Done) -> None:
        """Report a job that ended before its first text: as an event, or by raising."""
        error = done.error or RuntimeError("the job ended before it started")
        if not self._started:
            raise error
        body = msgspec.json.encode({"error": describe(error).body()})
        await self.write(b"event: error\ndata: " + body + b"\n\n", more=False)
