"""Bodies of requests: JSON bytes to validated values.

Owns: the fields that are read, how lenient each is (docs/spec/server-and-cli.md 1.3, 1.4), and the
sentence that a wrong one earns. Refuses to know: tokens, templates, replies. Invariant: what comes
out is in range; what does not fit is a `RequestError` with status 400, whatever the bytes were.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from ds4py.config import SamplingParams
from ds4py.errors import RequestError
from ds4py.text.deepseek4 import EFFORTS
from ds4py.text.raw_json import members

_MAX_COUNT: Final = 2**31 - 1
_MAX_SEED: Final = 2**63 - 1
_MAX_FACTOR: Final = 1_000_000  # larger temperatures change nothing but overflow float32
_MAX_STOPS: Final = 1024
_MAX_MODEL_NAME: Final = 512
_MAX_MESSAGES: Final = 100_000
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_THINKING_MODELS: Final = {"deepseek-chat": False, "deepseek-reasoner": True}
_ESCAPES: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

Number = int | float
_Body = TypeVar("_Body", bound="_Common")
_Value = TypeVar("_Value")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Thinking(msgspec.Struct):
    type: str | None = None


class _TemplateKwargs(msgspec.Struct):
    enable_thinking: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    """Fields that chat and completions share; null means absent everywhere."""

    model: str | None = None
    max_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    seed: Number | None = None
    stop: str | list[Any] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    think: bool | None = None
    thinking: bool | _Thinking | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateKwargs | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"null")


class _PastCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _ChatMessage(msgspec.Struct):
    role: str | None = None
    content: Any = None  # text, parts, or something that ds4 reads as empty
    reasoning_content: Any = None
    tool_calls: list[_PastCall] | None = None
    tool_call_id: str | None = None


class _ChatBody(_Common):
    messages: list[_ChatMessage] | None = None
    max_completion_tokens: Number | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Any = None
    default_system: bool | None = None


class _CompletionBody(_Common):
    prompt: str | list[Any] | None = None
    raw: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request says about its answer.

    Args:
        model: Name to echo; None takes the served model's.
        max_tokens: Output budget in tokens; None takes the server's.
        sampling: How tokens are chosen, the server's defaults filled in.
        stop: Texts that end the answer; none is empty.
        stream: Answer by server-sent events.
        include_usage: Send the usage chunk of a stream.
        think: How much to reason, a word of `EFFORTS`; None if the request does not say.
        token_ids: Send the sampled token ids beside the text, an addition of ds4py.
        progress: Tell in comments of the stream how much of the prompt is evaluated, another one.
    """

    model: str | None
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    think: str | None = None
    token_ids: bool = False
    progress: bool = False


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call of a tool in an earlier turn; `arguments` is the client's own JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Args:
        role: One of the five that templates know.
        content: Its text.
        reasoning: What an assistant thought before.
        calls: What an assistant asked for.
        call_id: The call that a tool answers.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked body of `/v1/chat/completions`.

    Args:
        messages: At least one.
        options: What it says about its answer.
        tools: Those that the model may call: the client's own JSON texts of objects.
        default_system: Begin with the model's own system text if no message has one, an addition
            of ds4py.
    """

    messages: tuple[Message, ...]
    options: Options
    tools: tuple[str, ...] = ()
    default_system: bool = False


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked body of `/v1/completions`.

    Args:
        prompt: Text, or token ids not yet in range.
        options: What it says about its answer.
        raw: The text is a whole prompt as the model reads it, an addition of ds4py.
    """

    prompt: str | tuple[int, ...]
    options: Options
    raw: bool = False


def read_chat(body: bytes, defaults: SamplingParams) -> ChatRequest:
    """Check the body of `/v1/chat/completions`.

    Args:
        body: The bytes that came.
        defaults: Sampling of requests that name no value.

    Raises:
        RequestError: Status 400; the sentence says what was found and what was expected.
    """
    parsed = _decode(body, _ChatBody)
    if parsed.messages is None:
        raise RequestError("missing messages", param="messages")
    if not parsed.messages:
        raise _wrong("messages", "an empty list", "at least one message")
    if len(parsed.messages) > _MAX_MESSAGES:
        raise _wrong("messages", len(parsed.messages), f"at most {_MAX_MESSAGES}")
    turns = tuple(turn for turn in map(_message, parsed.messages) if turn)
    if not turns:
        raise _wrong("messages", "no known role", f"one of {', '.join(sorted(_ROLES))}")
    name, value = _last_given(
        body, max_tokens=parsed.max_tokens, max_completion_tokens=parsed.max_completion_tokens
    )
    options = _options(parsed, body, _count(name, value), defaults)
    return ChatRequest(turns, options, _tools(parsed), bool(parsed.default_system))


def read_completion(body: bytes, defaults: SamplingParams) -> CompletionRequest:
    """Check the body of `/v1/completions`; raises as `read_chat`."""
    parsed = _decode(body, _CompletionBody)
    if parsed.prompt is None:
        raise RequestError("missing prompt", param="prompt")
    budget = _count("max_tokens", parsed.max_tokens)
    options = _options(parsed, body, budget, defaults)
    return CompletionRequest(_prompt(parsed.prompt), options, bool(parsed.raw))


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    if not body.strip():
        raise RequestError("invalid JSON request: the body is empty; expected a JSON object")
    try:
        return msgspec.json.decode(_mend_surrogates(body), type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.rstrip("`").lstrip(".") or None
        subject = f"{param}: " if param else ""
        raise RequestError(
            f"invalid JSON request: {subject}{_lower_first(what)}", param=param
        ) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"invalid JSON request: {_lower_first(str(error))}") from error
    except RecursionError as error:
        raise RequestError("invalid JSON request: nested too deeply") from error


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if not text.startswith("JSON") else text


def _mend_surrogates(body: bytes) -> bytes:
    """Replace escapes of lone surrogates, which strict JSON readers refuse, by U+FFFD."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found["lone"] else found[0], body)


def _wrong(param: str, got: object, expected: str) -> RequestError:
    return RequestError(f"{param}: got {got}, expected {expected}", param=param)


def _options(
    parsed: _Common, body: bytes, max_tokens: int | None, defaults: SamplingParams
) -> Options:
    if parsed.model is not None and len(parsed.model) > _MAX_MODEL_NAME:
        got = f"a name of {len(parsed.model)} characters"
        raise _wrong("model", got, f"at most {_MAX_MODEL_NAME}")
    options = parsed.stream_options
    return Options(
        model=parsed.model,
        max_tokens=max_tokens,
        sampling=_sampling(parsed, defaults),
        stop=_stops(parsed.stop),
        stream=bool(parsed.stream),
        include_usage=bool(options and options.include_usage),
        think=_think(parsed, body),
        token_ids=bool(parsed.return_token_ids),
        progress=bool(parsed.return_progress and parsed.stream),
    )


def _sampling(parsed: _Common, defaults: SamplingParams) -> SamplingParams:
    def pick(value: Number | None, default: float) -> float:
        return default if value is None else float(min(max(value, -_MAX_FACTOR), _MAX_FACTOR))

    top_k = _count("top_k", parsed.top_k)
    seed = _count("seed", parsed.seed, most=_MAX_SEED)
    return SamplingParams(
        temperature=pick(parsed.temperature, defaults.temperature),
        top_k=defaults.top_k if top_k is None else top_k,
        top_p=pick(parsed.top_p, defaults.top_p),
        min_p=pick(parsed.min_p, defaults.min_p),
        seed=defaults.seed if seed is None else seed,
    )


def _count(param: str, value: Number | None, *, most: int = _MAX_COUNT) -> int | None:
    """Bring a count into range: negative is 0, too large is `most`; 3.0 is 3."""
    if value is None:
        return None
    if isinstance(value, float) and not value.is_integer():
        raise _wrong(param, value, "a whole number")
    return min(max(int(value), 0), most)


def _last_given(body: bytes, **values: _Value | None) -> tuple[str, _Value | None]:
    """Choose among fields that say the same: the last in the body that is not null wins."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) > 1:
        names = list(msgspec.json.decode(_mend_surrogates(body), type=dict[str, msgspec.Raw]))
        given = dict(sorted(given.items(), key=lambda field: names.index(field[0])))
    return ("", None) if not given else given.popitem()


def _think(parsed: _Common, body: bytes) -> str | None:
    """Return how much to reason (docs/spec/server-and-cli.md 3.2): off wins over any effort."""
    effort = parsed.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise _wrong("reasoning_effort", f"{effort!a:.40}", f"one of {', '.join(EFFORTS)}")
    thinking, kwargs = parsed.thinking, parsed.chat_template_kwargs
    _, on = _last_given(
        body,
        think=parsed.think,
        thinking=thinking.type != "disabled" if isinstance(thinking, _Thinking) else thinking,
        chat_template_kwargs=kwargs.enable_thinking if kwargs else None,
    )
    if on is None:
        on = _THINKING_MODELS.get(parsed.model or "")
    if on is None:
        return effort
    return effort or "high" if on else "none"


def _stops(stop: str | Sequence[Any] | None) -> tuple[str, ...]:
    """Read `stop`: elements that are no strings are skipped, empty ones dropped."""
    listed = [stop] if isinstance(stop, str) else stop or []
    texts = tuple(text for text in listed if isinstance(text, str) and text)
    if len(texts) > _MAX_STOPS:
        raise _wrong("stop", f"{len(texts)} texts", f"at most {_MAX_STOPS}")
    return texts


def _message(message: _ChatMessage) -> Message | None:
    """Read one turn; a role that ds4 does not know drops it, a missing one means the user."""
    role = message.role or "user"
    if role == "function":
        role = "tool"
    if role not in _ROLES:
        return None
    calls = tuple(call for call in map(_past_call, message.tool_calls or ()) if call)
    return Message(
        role,
        _content_text(message.content),
        reasoning=_content_text(message.reasoning_content),
        calls=calls,
        call_id=message.tool_call_id or "",
    )


def _past_call(call: _PastCall) -> PastCall | None:
    """Read a call of an earlier turn; one without a name or arguments is dropped, as in ds4."""
    function = call.function
    if function is None or function.name is None:
        return None
    arguments = _source(function.arguments, "messages")
    if arguments == "null":
        return None
    if arguments.startswith('"'):
        arguments = msgspec.json.decode(arguments, type=str)
    return PastCall(call.id or "", function.name, arguments)


def _tools(parsed: _ChatBody) -> tuple[str, ...]:
    """Return the client's own texts of the tools that the model may call."""
    if parsed.tool_choice == "none":
        return ()
    texts = tuple(_source(tool, "tools") for tool in parsed.tools or ())
    for number, text in enumerate(texts):
        if members(text) is None:
            raise _wrong(f"tools[{number}]", f"{text!a:.80}", "a JSON object")
    return texts


def _source(raw: msgspec.Raw, param: str) -> str:
    """Return the source text of a value, of which so far only the syntax was checked."""
    try:
        return bytes(raw).decode()
    except UnicodeError as error:
        raise RequestError(f"invalid JSON request: {param}: not UTF-8", param=param) from error


def _content_text(content: Any) -> str:
    """Join the text of a message; images, numbers and unknown parts are silently empty."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """Read a prompt: text, the first text of a list, or token ids (also as the first list)."""
    if isinstance(prompt, str):
        return prompt
    for element in prompt:
        if isinstance(element, str):
            return element
    ids = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
    wrong = next((type(one).__name__ for one in ids if type(one) is not int), None)
    if wrong is not None:
        got = f"a list that holds {wrong}"
        raise _wrong("prompt", got, "a string, a list of strings, or a list of token ids")
    return tuple(ids)
