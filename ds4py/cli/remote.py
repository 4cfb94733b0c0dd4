"""Ask a server over HTTP and stream its answer.

Owns: the client's half of the OpenAI dialect. Refuses to know: models, terminals. Invariant: every
failure of the other side becomes one sentence that names it; leaving the stream closes the
connection, so that the server stops.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec

from ds4py.cli.answer import Event, Figures, Piece, Prefill, Question
from ds4py.config import Address
from ds4py.errors import ConnectError, PeerClosedError, RequestError, TransportTimeoutError
from ds4py.text.reasoning import ReasoningSplitter

_THINK: Final = "<think>"
_CONNECT_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 120.0  # a server says something every few seconds, were it only a comment
_PROGRESS: Final = re.compile(rb": prefill (\d{1,12})/(\d{1,12})")
_MAX_LINE: Final = 1 << 20
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, LookupError, AttributeError, TypeError)


def ask(
    server: Address, question: Question, *, want_ids: bool, want_progress: bool = False
) -> Iterator[Event | Prefill]:
    """Yield the answer of a server, and before it how far the prompt is, if that is wanted.

    Raises:
        TransportError: The server can not be reached or breaks off.
        RequestError: It refuses or fails; its own words.
    """
    path, body = _request(question, want_ids=want_ids)
    if want_progress:
        body["return_progress"] = True
    # a server keeps the reasoning of a bare prompt in its text, but that of a chat apart
    opened = question.raw and (question.text or "").rstrip().endswith(_THINK)
    parts = ReasoningSplitter(thinking=opened)
    timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
    url = f"http://{server}{path}"
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False) as client,
            client.stream("POST", url, json=body) as response,
        ):
            if response.status_code != 200:
                raise _refusal(_beginning(response), response.status_code)
            yield from _events(response, parts)
    except httpx.ConnectError as e:
        reason = f"no server answers ({e}); start ds4py-server, or check --host"
        raise ConnectError(reason, peer=str(server)) from e
    except httpx.TimeoutException as e:
        raise TransportTimeoutError("the server said nothing for too long", peer=str(server)) from e
    except httpx.HTTPError as e:
        raise PeerClosedError(f"the server broke off: {e}", peer=str(server)) from e


def _request(question: Question, *, want_ids: bool) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        **question.sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if question.max_tokens is not None:
        body["max_tokens"] = question.max_tokens
    if want_ids:
        body["return_token_ids"] = True
    if question.ids is not None:
        return "/v1/completions", body | {"prompt": list(question.ids)}
    if question.raw:
        return "/v1/completions", body | {"prompt": question.text, "raw": True}
    system = [{"role": "system", "content": question.system}] if question.system else []
    body["messages"] = [*system, {"role": "user", "content": question.text}]
    if question.system is None:
        body["default_system"] = True
    if question.think is not None:
        body["reasoning_effort"] = question.think
    return "/v1/chat/completions", body


def _events(response: httpx.Response, parts: ReasoningSplitter) -> Iterator[Event | Prefill]:
    """Read the stream; see docs/spec/server-and-cli.md 1.11 and 1.12."""
    finish, failed = "", False
    for line in _lines(response):
        if line == b"event: error":
            failed = True
        if told := _PROGRESS.fullmatch(line):
            yield Prefill(int(told[1]), int(told[2]))
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            return
        chunk = _decode(line[6:], response)
        if failed or "error" in chunk:
            raise _refusal(line[6:], 500)
        try:
            for choice in chunk.get("choices", []):
                finish = choice.get("finish_reason") or finish
                piece = _piece(choice, parts)
                if piece != Piece():
                    yield piece
            if chunk.get("usage"):
                yield _figures(chunk, finish)
        except (AttributeError, TypeError) as e:
            what = f"sent an event of no known form ({e})"
            raise PeerClosedError(what, peer=_name(response)) from e
    raise PeerClosedError("the stream ended without its end mark", peer=_name(response))


def _piece(choice: dict[str, Any], parts: ReasoningSplitter) -> Piece:
    delta = choice.get("delta", {})
    reasoning, text = parts.push(str(choice.get("text") or delta.get("content") or ""))
    if choice.get("finish_reason"):
        reasoning += parts.finish().reasoning
    reasoning += str(delta.get("reasoning_content") or "")
    return Piece(text, tuple(choice.get("token_ids") or ()), reasoning)


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yield lines without their ends; a server can not fill our memory with one."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
        if len(rest) > _MAX_LINE:
            raise PeerClosedError("sent a line without end", peer=_name(response))


def _beginning(response: httpx.Response) -> bytes:
    """Return the body, or as much of it as an error can have."""
    body = b""
    for part in response.iter_bytes():
        body += part
        if len(body) > _MAX_LINE:
            break
    return body


def _name(response: httpx.Response) -> str:
    return f"{response.url.host}:{response.url.port}"


def _decode(raw: bytes, response: httpx.Response) -> dict[str, Any]:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
        chunk = msgspec.json.decode(raw)
        if isinstance(chunk, dict):
            return chunk
    raise PeerClosedError("sent something that is no JSON object", peer=_name(response))


def _figures(chunk: dict[str, Any], finish: str) -> Figures:
    usage, timings = chunk["usage"], chunk.get("timings", {})
    return Figures(
        n_prompt=usage.get("prompt_tokens", 0),
        n_cached=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        n_generated=usage.get("completion_tokens", 0),
        prefill_per_second=timings.get("prompt_per_second") or 0.0,
        decode_per_second=timings.get("predicted_per_second") or 0.0,
        finish=finish,
    )


def _refusal(raw: bytes, status: int) -> RequestError:
    """Return the server's error as ours."""
    message, code = f"the server answered with status {status}", None
    with contextlib.suppress(*_UNREADABLE):
        error = msgspec.json.decode(raw)["error"]
        message, code = str(error["message"]), error.get("code")
    return RequestError(message, status=status, code=code)
