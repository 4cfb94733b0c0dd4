"""Ask a server over HTTP and stream its answer.

Owns: the client's half of the OpenAI dialect, and of `/health`. Refuses to know: models, terminals.
Invariant: every failure of the other side becomes one sentence that names it; leaving the stream
closes the connection, so that the server stops.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import httpx
import msgspec

from ds4py.api.events import Event, Figures, Piece
from ds4py.cli.chat.conversation import ChatHistory, Progress, StageFigures, Status
from ds4py.cli.chat.printing import Prefill, Question, awaited
from ds4py.config import Address
from ds4py.errors import (
    ConfigError,
    ConnectError,
    PeerClosedError,
    RequestError,
    TransportTimeoutError,
)
from ds4py.text.reasoning import ReasoningSplitter

_CHAT: Final = "/v1/chat/completions"
_THINK: Final = "<think>"
_CONNECT_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 120.0  # a server says something every few seconds, were it only a comment
_PROGRESS: Final = re.compile(rb": prefill (\d{1,12})/(\d{1,12})")
_MAX_LINE: Final = 1 << 20
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, LookupError, AttributeError, TypeError)


def ask(
    server: Address,
    question: Question,
    *,
    want_ids: bool,
    want_progress: bool = False,
    api_key: str | None = None,
) -> Iterator[Event | Prefill]:
    """Yield the answer of a server.

    Args:
        server: Where it is.
        question: What is asked.
        want_ids: Token ids are wanted beside the text.
        want_progress: Tell before the answer how far the prompt is.
        api_key: What the server wants to know of its clients, if it does.

    Raises:
        TransportError: The server cannot be reached or breaks off.
        RequestError: It refuses or fails; its own words.
    """
    path, body = _request(question, want_ids=want_ids)
    # a server keeps the reasoning of a bare prompt in its text, but that of a chat apart
    opened = question.raw and (question.text or "").rstrip().endswith(_THINK)
    if want_progress:
        body["return_progress"] = True
    return _post(server, path, body, api_key, opened=opened)


def _post(
    server: Address, path: str, body: dict[str, Any], api_key: str | None, *, opened: bool
) -> Generator[Event | Prefill, None, None]:
    """Yield the answer to a request; `opened` if its text begins inside the reasoning."""
    with (
        _reaching(server),
        _client(api_key) as client,
        client.stream("POST", f"http://{server}{path}", json=body) as response,
    ):
        if response.status_code != 200:
            raise _refusal(_beginning(response), response.status_code)
        yield from _events(response, ReasoningSplitter(thinking=opened))


def _client(api_key: str | None) -> httpx.Client:
    return httpx.Client(
        timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS),
        headers=None if api_key is None else {"Authorization": f"Bearer {api_key}"},
        trust_env=False,
    )


@contextmanager
def _reaching(server: Address) -> Iterator[None]:
    """Turn what can go wrong on the way to a server into our own errors."""
    try:
        yield
    except httpx.ConnectError as e:
        reason = f"no server answers ({e}); start ds4py-server, or check --host"
        raise ConnectError(reason, peer=str(server)) from e
    except httpx.TimeoutException as e:
        raise TransportTimeoutError("the server said nothing for too long", peer=str(server)) from e
    except httpx.HTTPError as e:
        raise PeerClosedError(f"the server broke off: {e}", peer=str(server)) from e


def _request(question: Question, *, want_ids: bool) -> tuple[str, dict[str, Any]]:
    body = _common(question.sampling, question.max_tokens, want_ids=want_ids)
    if question.ids is not None:
        return "/v1/completions", body | {"prompt": list(question.ids)}
    if question.raw:
        return "/v1/completions", body | {"prompt": question.text, "raw": True}
    assert question.text is not None
    asked = [{"role": "user", "content": question.text}]
    return _CHAT, body | _chat(question.system, asked, question.think)


def _common(
    sampling: dict[str, float | int], max_tokens: int | None, *, want_ids: bool
) -> dict[str, Any]:
    """Return the fields of every request."""
    body: dict[str, Any] = {
        **sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if want_ids:
        body["return_token_ids"] = True
    return body


def _chat(system: str | None, turns: Sequence[dict[str, str]], think: str | None) -> dict[str, Any]:
    """Return the fields of a conversation; a system text of None is the model's own."""
    first = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"messages": [*first, *turns]}
    if system is None:
        body["default_system"] = True
    if think is not None:
        body["reasoning_effort"] = think
    return body


class RemotePartner:
    """A `Partner` that is a server; it keeps nothing but the words.

    Args:
        server: Where it is.
        sampling: Given sampling flags only.
        max_tokens: Output budget of an answer; None is the server's to choose.
        want_ids: Token ids are wanted beside the text.
        api_key: As in `ask`.
    """

    def __init__(
        self,
        server: Address,
        sampling: dict[str, float | int],
        max_tokens: int | None,
        *,
        want_ids: bool = False,
        api_key: str | None = None,
    ) -> None:
        self._server = server
        self._body = _common(sampling, max_tokens, want_ids=want_ids) | {"return_progress": True}
        self._api_key = api_key

    def reply(
        self, talk: ChatHistory, question: str, progress: Progress
    ) -> Generator[Event, None, None]:
        """See `Partner.reply`; Ctrl+C interrupts the wait for the server."""
        turns = [*talk.turns, {"role": "user", "content": question}]
        body = self._body | _chat(talk.system, turns, talk.think)
        events = _post(self._server, _CHAT, body, self._api_key, opened=False)
        with contextlib.closing(events):
            yield from awaited(events, progress)

    def forget(self) -> None:
        """See `Partner.forget`: every request brings the whole conversation."""

    def resize(self, n_ctx: int) -> None:
        """See `Partner.resize`."""
        raise ConfigError(
            f"context {n_ctx}: that of {self._server} is the server's; start it with --ctx {n_ctx}"
        )

    def status(self) -> Status:
        """See `Partner.status`."""
        with (
            _reaching(self._server),
            _client(self._api_key) as client,
            client.stream("GET", f"http://{self._server}/health") as response,
        ):
            raw = _beginning(response)
        try:
            health = msgspec.json.decode(raw)
            return Status(
                model=str(health["model"]),
                where=f"at {self._server}",
                n_ctx=int(health["n_ctx"]),
                missing=str(health.get("missing", "")),
                stages=tuple(map(_stage, health["stages"])),
            )
        except (*_UNREADABLE, ValueError) as e:
            raise PeerClosedError("does not tell its state", peer=str(self._server)) from e

    def close(self) -> None:
        """See `Partner.close`."""


def _stage(told: dict[str, Any]) -> StageFigures:
    layers = "no layers" if told["layers"] is None else f"layers {told['layers']}"
    return StageFigures(
        str(told["name"]),
        f"{layers} + head" if told["has_output"] else layers,
        float(told["prefill_per_second"] or 0),
        float(told["decode_per_second"] or 0),
    )


def _events(response: httpx.Response, parts: ReasoningSplitter) -> Iterator[Event | Prefill]:
    """Read the stream; see docs/spec/server-and-cli.md#chat-completions, #completions."""
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
    """Yield lines without their ends; a server cannot fill our memory with one."""
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
