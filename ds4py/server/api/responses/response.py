"""Replies of `/v1/responses` (docs/spec/server-and-cli.md#usage, #responses).

Owns: the JSON of whole replies and of events, items with their numbers and ids. Refuses to know:
sockets, where the numbers came from. Invariant: items never overlap; each that was added is done,
under the same id, and stands as it was done in the response that ends the stream.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator

import msgspec

from ds4py.server.api.reply import Json, comment, data, named, timings_of
from ds4py.server.errors import Problem
from ds4py.server.requests.events import (
    Answer,
    CallClosed,
    CallFragment,
    CallOpened,
    Done,
    Started,
    Tally,
    TextPiece,
    Written,
)
from ds4py.server.requests.request import Conversation, GenerationRequest, Toolbox, ToolName

_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}


def responses_response(
    request: GenerationRequest, *, number: int, created: int, model: str
) -> ResponsesReply:
    """See `NewResponse`; such replies have random ids."""
    del number
    prompt = request.prompt
    tools = prompt.tools if isinstance(prompt, Conversation) else Toolbox()
    return ResponsesReply(
        created=created, model=model, toolbox=tools, summary=request.show_reasoning
    )


class ResponsesReply:
    """Shapes of one reply.

    Args:
        created: Unix time, seconds.
        model: Name to echo.
        toolbox: What the model could call.
        summary: Show the reasoning.
    """

    def __init__(self, *, created: int, model: str, toolbox: Toolbox, summary: bool) -> None:
        self._id = _name("resp")
        self._created = created
        self._model = model
        self._toolbox = toolbox
        self._summary = summary
        self._numbers = itertools.count()
        self._output: list[Json] = []
        self._open: _Item | None = None
        self._created_told = False

    @property
    def id(self) -> str:
        """See `ResponseShape.id`."""
        return self._id

    def whole(self, answer: Answer, done: Done) -> Json:
        """See `ResponseShape.whole`: what the stream of the same events would end with."""
        events: list[Written] = []
        if answer.reasoning:
            events.append(TextPiece("", reasoning=answer.reasoning))
        if answer.text:
            events.append(TextPiece(answer.text))
        for call in answer.calls:
            events += [CallOpened(call.index, call.id, call.name)]
            events += [CallFragment(call.index, call.arguments), CallClosed(call.index)]
        for event in events:
            for _ in self.written(event):
                pass
        for _ in self._end(done):
            pass
        return self._final(done) | {"timings": timings_of(done.tally)}

    def started(self, event: Started) -> Iterator[bytes]:
        """See `ResponseShape.started`; a keepalive may have told it already."""
        del event
        if not self._created_told:
            yield self._alive()

    def written(self, event: Written) -> Iterator[bytes]:
        """See `ResponseShape.written`."""
        match event:
            case TextPiece(text="", reasoning=""):
                pass
            case TextPiece(reasoning=""):
                yield from self._within(_Message)
                yield from self._grow(event.text)
            case TextPiece():
                if self._summary:
                    yield from self._within(_Reasoning)
                    yield from self._grow(event.reasoning)
            case CallOpened():
                yield from self._close()
                yield from self._begin(_call_item(self._toolbox.named(event.name), event.id))
            case CallFragment():
                yield from self._grow(event.text)
            case CallClosed():
                yield from self._close()

    def closing(self, done: Done) -> Iterator[bytes]:
        """See `ResponseShape.closing`."""
        yield from self._end(done)
        final = self._final(done)
        yield self._event(f"response.{final['status']}", {"response": final})

    def keepalive(self, doing: str) -> bytes:
        """See `ResponseShape.keepalive`: an event, since Codex does not count comments."""
        return comment(doing) + self._alive()

    def failure(self, problem: Problem) -> bytes:
        """See `ResponseShape.failure`."""
        return named("error", {"error": problem.body(in_stream=True)})

    def _alive(self) -> bytes:
        """Return the event that must come first, and later the one that tells nothing new."""
        kind = "response.in_progress" if self._created_told else "response.created"
        self._created_told = True
        return self._event(kind, {"response": self._response("in_progress")})

    def _end(self, done: Done) -> Iterator[bytes]:
        finished = _STATUS.get(done.finish, "incomplete")
        # reasoning that nothing follows was cut short, whatever ended it
        cut = isinstance(self._open, _Reasoning)
        yield from self._close("incomplete" if cut else finished)

    def _within(self, kind: type[_Message | _Reasoning]) -> Iterator[bytes]:
        """Begin an item unless it is the open one."""
        if not isinstance(self._open, kind):
            yield from self._close()
            yield from self._begin(kind())

    def _begin(self, item: _Item) -> Iterator[bytes]:
        self._open = item
        yield from self._told(item.begin())

    def _grow(self, text: str) -> Iterator[bytes]:
        assert self._open is not None  # fragments follow what opened their item
        yield from self._told(self._open.grow(text))

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        item, self._open = self._open, None
        yield from self._told(item.end(status))
        self._output.append(item.value(status))

    def _told(self, events: Iterator[tuple[str, Json]]) -> Iterator[bytes]:
        for name, content in events:
            yield self._event(name, {"output_index": len(self._output)} | content)

    def _event(self, kind: str, content: Json) -> bytes:
        return data({"type": kind, "sequence_number": next(self._numbers)} | content)

    def _response(self, status: str, usage: Json | None = None) -> Json:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }

    def _final(self, done: Done) -> Json:
        response = self._response(_STATUS.get(done.finish, "failed"), usage_of(done.tally))
        if done.finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if done.error is not None:
            response["error"] = {"code": "server_error", "message": "generation failed"}
        return response


class _Item:
    """One item of the output while it grows; events are (type, content)."""

    prefix: str

    def __init__(self) -> None:
        self.id = _name(self.prefix)
        self.text = ""

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield "response.output_item.added", {"item": self.empty()}

    def grow(self, text: str) -> Iterator[tuple[str, Json]]:
        """Add text; by default nobody hears of it before the end."""
        self.text += text
        yield from ()

    def end(self, status: str) -> Iterator[tuple[str, Json]]:
        yield "response.output_item.done", {"item": self.value(status)}

    def empty(self) -> Json:
        return self.value("in_progress")

    def value(self, status: str) -> Json:
        raise NotImplementedError


class _Reasoning(_Item):
    prefix = "rs"

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield from super().begin()
        part = {"type": "summary_text", "text": ""}
        yield "response.reasoning_summary_part.added", self._at() | {"part": part}

    def grow(self, text: str) -> Iterator[tuple[str, Json]]:
        self.text += text
        yield "response.reasoning_summary_text.delta", self._at() | {"delta": text}

    def end(self, status: str) -> Iterator[tuple[str, Json]]:
        yield "response.reasoning_summary_text.done", self._at() | {"text": self.text}
        part = {"type": "summary_text", "text": self.text}
        yield "response.reasoning_summary_part.done", self._at() | {"part": part}
        yield from super().end(status)

    def value(self, status: str) -> Json:
        summary = [{"type": "summary_text", "text": self.text}] if self.text else []
        return {"id": self.id, "type": "reasoning", "status": status, "summary": summary}

    def _at(self) -> Json:
        return {"item_id": self.id, "summary_index": 0}


class _Message(_Item):
    prefix = "msg"

    def begin(self) -> Iterator[tuple[str, Json]]:
        yield from super().begin()
        yield "response.content_part.added", self._at() | {"part": self._part()}

    def grow(self, text: str) -> Iterator[tuple[str, Json]]:
        self.text += text
        yield "response.output_text.delta", self._at() | {"delta": text, "logprobs": []}

    def end(self, status: str) -> Iterator[tuple[str, Json]]:
        yield "response.output_text.done", self._at() | {"text": self.text, "logprobs": []}
        yield "response.content_part.done", self._at() | {"part": self._part()}
        yield from super().end(status)

    def value(self, status: str) -> Json:
        content = [self._part()] if self.text else []
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": []}

    def _at(self) -> Json:
        return {"item_id": self.id, "content_index": 0}


class _Call(_Item):
    """A call of any kind.

    Args:
        tool: What the client calls it.
        call_id: What the client names when it returns the result.
    """

    prefix = "fc"

    def __init__(self, tool: ToolName, call_id: str) -> None:
        super().__init__()
        self.tool = tool
        self.call_id = call_id

    def _head(self, kind: str, status: str) -> Json:
        return {"id": self.id, "type": kind, "status": status, "call_id": self.call_id}


class _FunctionCall(_Call):
    def grow(self, text: str) -> Iterator[tuple[str, Json]]:
        self.text += text
        delta: Json = {"item_id": self.id, "delta": text}
        yield "response.function_call_arguments.delta", delta

    def end(self, status: str) -> Iterator[tuple[str, Json]]:
        whole: Json = {"item_id": self.id, "name": self.tool.name, "arguments": self.text}
        yield "response.function_call_arguments.done", whole
        yield from super().end(status)

    def value(self, status: str) -> Json:
        named_by: Json = {"name": self.tool.name}
        if self.tool.namespace is not None:
            named_by["namespace"] = self.tool.namespace
        return self._head("function_call", status) | named_by | {"arguments": self.text}


class _CustomCall(_Call):
    """A call with one text, of which the arguments' JSON is only the wrapping."""

    prefix = "ctc"

    def end(self, status: str) -> Iterator[tuple[str, Json]]:
        text = self._input()
        yield "response.custom_tool_call_input.delta", {"item_id": self.id, "delta": text}
        yield "response.custom_tool_call_input.done", {"item_id": self.id, "input": text}
        yield from super().end(status)

    def empty(self) -> Json:
        return self._named("in_progress") | {"input": ""}

    def value(self, status: str) -> Json:
        return self._named(status) | {"input": self._input()}

    def _named(self, status: str) -> Json:
        return self._head("custom_tool_call", status) | {"name": self.tool.name}

    def _input(self) -> str:
        values = _members(self.text)
        text = values.get("input") if "input" in values else next(iter(values.values()), "")
        return text if isinstance(text, str) else msgspec.json.encode(text).decode()


class _SearchCall(_Call):
    """A search for tools, which the client does."""

    prefix = "tsc"

    def value(self, status: str) -> Json:
        head = self._head("tool_search_call", status)
        return head | {"execution": "client", "arguments": _members(self.text)}


def _call_item(tool: ToolName, call_id: str) -> _Call:
    kinds = {"function": _FunctionCall, "custom": _CustomCall, "tool_search": _SearchCall}
    return kinds[tool.kind](tool, call_id)


def _members(text: str) -> dict[str, object]:
    """Return an object's members; of a text that broke off, none."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def usage_of(tally: Tally) -> Json:
    """Return the `usage` object."""
    return {
        "input_tokens": tally.n_prompt,
        "input_tokens_details": {
            "cached_tokens": tally.n_cached,
            "cache_write_tokens": tally.n_prompt - tally.n_cached,
        },
        "output_tokens": tally.n_completion,
        "output_tokens_details": {"reasoning_tokens": tally.n_reasoning},
        "total_tokens": tally.n_prompt + tally.n_completion,
    }
