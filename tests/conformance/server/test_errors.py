"""C11 to C21: models, what is refused in which words, all of server-and-cli.md#errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds4py.errors import CapacityError, Ds4Error, RemoteWorkError, RouteIncompleteError
from tests.conformance.server.peer import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    POSTS,
    RESPONSES,
    Event,
    asking,
    connect,
    exchange,
    get,
    message_of,
    model,
    parse,
    post,
    posting,
    prompt_of,
    read_all,
    read_until,
    request,
    saying,
    served,
    until,
)
from tests.fakes import Gate
from tests.unit.server.support import DEADLINE

OPENAI = (CHAT, COMPLETIONS, RESPONSES)
GONE = RemoteWorkError("out of memory", hop="worker1")
SENTENCE = "worker1 refused the work: out of memory"
INVALID = "invalid_request_error"
PARAM = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", MESSAGES: "messages"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server for tests that leave it as it was."""
    with saying("Hi") as shared:
        yield shared


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "most"), [(393216, 4096), (100, 100)])
@pytest.mark.parametrize(
    ("model_id", "display"), [(0, "DeepSeek V4 Flash"), (1, "DeepSeek V4 Pro")]
)
def test_c11_both_models_are_listed(model_id: int, display: str, budget: int, most: int) -> None:
    fake = model("Hi", n_ctx=4096, model_id=model_id, name=display)
    with served(fake, max_tokens=budget) as (_, port):
        listed = get(port, "/v1/models").json
        single = [get(port, f"/v1/models/{entry['id']}").json for entry in listed["data"]]
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["deepseek-v4-flash", "deepseek-v4-pro"]
    assert single == listed["data"]
    for entry in single:
        assert (entry["object"], entry["created"]) == ("model", 1767225600)
        assert (entry["owned_by"], entry["name"]) == ("ds4.c", display)
        assert entry["context_length"] == 4096
        provider = entry["top_provider"]
        assert (provider["context_length"], provider["max_completion_tokens"]) == (4096, most)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("stream", [False, True])
def test_c12_the_model_is_echoed(port: int, path: str, stream: bool) -> None:
    def names(port: int, **members: str) -> set[str]:
        answer = post(port, path, asking(path, stream=stream, **members))
        found = answer.payloads if stream else [answer.json]
        holders = [
            one.get("response") or one.get("message") or one for one in found if one != "[DONE]"
        ]
        return {holder["model"] for holder in holders if "model" in holder}

    assert names(port, model="claude-opus-99") == {"claude-opus-99"}
    assert names(port) == {"deepseek-v4-flash"}


# --- what a body may say --------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"messages":}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"x":' * 3000 + b"1" + b"}" * 3000,
        b'{"stream":"yes"}',
        b'{"temperature":{}}',
    ],
)
def test_c13_what_is_no_json_object(port: int, path: str, body: bytes) -> None:
    """Malformed JSON is a 400 on every route, with a message and a type.

    Differs from ds4: behind `invalid JSON request` it says what was found where; clients of
    Anthropic get their own envelope.
    """
    answer = post(port, path, body)
    assert answer.status == 400
    assert message_of(path, answer).startswith("invalid JSON request")
    assert answer.json["error"]["type"] == INVALID
    assert post(port, path, asking(path)).status == 200


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (CHAT, "missing messages"),
        (COMPLETIONS, "missing prompt"),
        (RESPONSES, "missing input"),
        (MESSAGES, "missing messages"),
        (f"{MESSAGES}/count_tokens", "missing messages"),
    ],
)
@pytest.mark.parametrize("body", [{}, {"messages": None, "prompt": None, "input": None}])
def test_c14_what_is_missing(port: int, path: str, said: str, body: dict[str, None]) -> None:
    answer = post(port, path, body)
    assert (answer.status, message_of(path, answer)) == (400, said)


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"reasoning_effort": "ultra"}),
        (COMPLETIONS, {"reasoning_effort": "ultra"}),
        (RESPONSES, {"reasoning": {"effort": "ultra"}}),
        (MESSAGES, {"reasoning_effort": "ultra"}),
        (MESSAGES, {"output_config": {"effort": "ultra"}}),
    ],
)
def test_c15_an_unknown_effort(port: int, path: str, members: dict[str, Any]) -> None:
    answer = post(port, path, asking(path, **members))
    assert answer.status == 400
    assert "'ultra'" in message_of(path, answer)


NULLS = [
    *("model", "max_tokens", "temperature", "top_p", "min_p", "top_k", "seed", "stream", "think"),
    *("stop", "tools", "tool_choice", "stream_options", "reasoning_effort", "reasoning"),
    *("thinking", "output_config", "instructions", "previous_response_id", "conversation"),
    *("max_completion_tokens", "max_output_tokens", "stop_sequences", "system", "metadata"),
    *("response_format", "text", "logprobs", "top_logprobs", "logit_bias", "user", "store"),
]


@pytest.mark.parametrize("path", POSTS)
def test_c16_null_is_absent(path: str) -> None:
    """Null is taken for any optional field.

    Differs from ds4: it refuses null for numbers, `model`, `stream` and `think`.
    """
    with saying("Hm.</think>Hi") as port:
        for name in NULLS:
            assert post(port, path, asking(path, **{name: None})).status == 200, name
        assert post(port, path, asking(path, **dict.fromkeys(NULLS))).status == 200


@pytest.mark.parametrize(
    ("path", "turn"),
    [
        (CHAT, {"role": "assistant", "content": None, "tool_calls": None, "id": None}),
        (CHAT, {"role": "user", "content": None, "tool_call_id": None}),
        (CHAT, {"role": None, "content": None}),
        (MESSAGES, {"role": "assistant", "content": None}),
        (RESPONSES, {"role": "user", "content": None, "status": None, "type": None}),
    ],
)
def test_c16_content_may_be_null(port: int, path: str, turn: dict[str, Any]) -> None:
    said = {"role": "user", "content": "Hi"}
    name = "input" if path == RESPONSES else "messages"
    assert post(port, path, {name: [said, turn, said]}).status == 200


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
@pytest.mark.parametrize("value", ["resp_1", {"id": "conv_1"}, "", 0, False])
def test_c17_responses_are_not_kept(port: int, name: str, value: Any) -> None:
    answer = post(port, RESPONSES, asking(RESPONSES, **{name: value}))
    assert post(port, RESPONSES, asking(RESPONSES, **{name: None})).status == 200
    assert answer.status == 400
    said = message_of(RESPONSES, answer)
    assert name in said
    assert "not supported" in said
    assert "replay the full input" in said


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", "tool_choice=required not supported"),
        ("any", "tool_choice=any not supported"),
        ({"type": "function", "name": "weather"}, "forced tool_choice not supported"),
    ],
)
def test_c18_responses_can_not_force_a_tool(port: int, choice: Any, said: str) -> None:
    answer = post(port, RESPONSES, asking(RESPONSES, tools=True, tool_choice=choice))
    assert (answer.status, message_of(RESPONSES, answer)) == (400, said)


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, "required"),
        (CHAT, {"type": "function", "function": {"name": "weather"}}),
        (MESSAGES, {"type": "any"}),
        (MESSAGES, {"type": "tool", "name": "weather"}),
    ],
)
def test_c18_elsewhere_every_choice_but_none_is_auto(path: str, choice: Any) -> None:
    def prompt(**members: Any) -> str:
        fake = model("Hm.</think>Hi")
        with served(fake) as (_, port):
            assert post(port, path, asking(path, tools=True, **members)).status == 200
        return prompt_of(fake)

    assert prompt(tool_choice=choice) == prompt() == prompt(tool_choice="auto")
    off = prompt(tool_choice="none" if path == CHAT else {"type": "none"})
    assert "weather" in prompt()
    assert "weather" not in off


# --- sizes ----------------------------------------------------------------------------------------


def overflow(path: str, n_ctx: int) -> Any:
    with served(model("Hi", n_ctx=n_ctx)) as (_, port):
        answer = post(port, path, asking(path, "many words " * 50, stream=True))
    assert answer.status == 400
    return answer.json


@pytest.mark.parametrize("path", OPENAI)
def test_c19_overflow(path: str) -> None:
    error = overflow(path, 64)["error"]
    n_prompt = error["n_prompt_tokens"]
    assert n_prompt > 64
    assert error == {
        "message": f"Prompt has {n_prompt} tokens, but the configured context size is 64 tokens",
        "type": INVALID,
        "param": PARAM[path],
        "code": "context_length_exceeded",
        "n_prompt_tokens": n_prompt,
        "n_ctx": 64,
    }


def test_c19_overflow_for_clients_of_anthropic() -> None:
    body = overflow(MESSAGES, 64)
    n_prompt = body["error"]["n_prompt_tokens"]
    words = (
        f"Prompt has {n_prompt} tokens, but the configured context size is 64 tokens "
        f"(prompt is too long: {n_prompt} tokens > 63 maximum)"
    )
    error = {"type": INVALID, "message": words, "n_prompt_tokens": n_prompt, "n_ctx": 64}
    assert body == {"type": "error", "error": error}


def test_c20_a_prompt_one_token_short_of_the_context() -> None:
    fake = model(None, n_ctx=64)
    with served(fake) as (_, port):
        full = post(port, COMPLETIONS, {"prompt": [5] * 64})
        fits = post(port, COMPLETIONS, {"prompt": [5] * 63}).json
    assert full.status == 400
    assert fits["usage"]["prompt_tokens"] == 63
    assert fits["usage"]["completion_tokens"] <= 1
    assert fits["choices"][0]["finish_reason"] == "length"


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("stream", [False, True])
def test_c21_a_prompt_that_fails_before_any_byte(path: str, stream: bool) -> None:
    with served(model("Hi", failures={0: GONE})) as (_, port):
        answer = post(port, path, asking(path, stream=stream))
        assert (answer.status, message_of(path, answer)) == (500, SENTENCE)
        assert post(port, path, asking(path, stream=stream)).status == 200


@pytest.mark.parametrize("path", POSTS)
def test_c21_a_prompt_that_fails_in_a_stream(path: str) -> None:
    """One `event: error`, and the end of the connection: no `[DONE]`, no other event."""
    gate = Gate()
    with (
        served(model("Hi", failures={0: GONE}, gate=gate), keepalive_seconds=0.01) as (_, port),
        connect(port) as sock,
    ):
        sock.sendall(posting(path, asking(path, stream=True)))
        begun = read_until(sock, b"ping" if path == MESSAGES else b": prefill")
        gate.open()
        events = parse(begun + read_all(sock)).events
    *silence, error = events
    assert all(event.comment or event.name == "ping" or _alive(event) for event in silence)
    assert error.name == "error"
    if path == MESSAGES:
        assert error.data == {"type": "error", "error": {"type": "api_error", "message": SENTENCE}}
    else:
        assert error.data["error"]["message"] == SENTENCE
        assert error.data["error"]["type"] == "server_error"


def _alive(event: Event) -> bool:
    """Tell whether an event of Responses says nothing but that there is one."""
    return event.data["type"] in ("response.created", "response.in_progress")


# --- every row of the table of docs/spec/server-and-cli.md#errors ---------------------------------

Row = tuple[bytes, int, str]


def _unknown(path: str) -> Row:
    result: Any = {
        RESPONSES: {"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]},
        MESSAGES: {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c9", "content": "x"}],
                }
            ]
        },
    }[path]
    names = {
        RESPONSES: ("call_id", "input history"),
        MESSAGES: ("tool_use_id", "messages history"),
    }
    name, history = names[path]
    words = f"{name} 'c9' is unknown to the live session; replay the full {history}"
    return posting(path, result), 400, words


@pytest.fixture(scope="module")
def narrow() -> Iterator[int]:
    """A server with a small context."""
    with served(model("Hi", n_ctx=256)) as (_, shared):
        yield shared


TABLE: list[Row] = [
    (request("POST", "/nope", b"{}"), 404, "unknown endpoint"),
    *((posting(path, b"[1]"), 400, "invalid JSON request") for path in POSTS),
    *((posting(path, {"max_tokens": "x"}), 400, "invalid JSON request") for path in POSTS),
    *(
        (posting(path, asking(path, reasoning_effort="?")), 400, "reasoning_effort: got '?'")
        for path in (CHAT, COMPLETIONS, MESSAGES)
    ),
    (posting(RESPONSES, {"input": [{"type": "telepathy"}]}), 400, "invalid JSON request"),
    (
        posting(RESPONSES, {"input": [{"content": [{"type": "input_image"}]}]}),
        400,
        "invalid JSON request",
    ),
    *((posting(path, b'{"x":' * 5000 + b"1" + b"}" * 5000), 400, "invalid JSON") for path in POSTS),
    (posting(CHAT, {}), 400, "missing messages"),
    (posting(MESSAGES, {}), 400, "missing messages"),
    (posting(COMPLETIONS, {}), 400, "missing prompt"),
    (posting(RESPONSES, {}), 400, "missing input"),
    (
        posting(RESPONSES, asking(RESPONSES, tool_choice="required")),
        400,
        "tool_choice=required not supported",
    ),
    (posting(RESPONSES, asking(RESPONSES, tool_choice={})), 400, "forced tool_choice"),
    (posting(RESPONSES, asking(RESPONSES, previous_response_id="r")), 400, "previous_response_id"),
    (posting(RESPONSES, asking(RESPONSES, conversation="c")), 400, "conversation is not supported"),
    _unknown(RESPONSES),
    _unknown(MESSAGES),
    *((posting(path, asking(path, "word " * 999)), 400, "Prompt has ") for path in POSTS),
]


@pytest.mark.parametrize(("sent", "status", "said"), TABLE)
def test_c13_c14_every_refusal_of_the_table(
    narrow: int, sent: bytes, status: int, said: str
) -> None:
    """Status, sentence, type and shape of each row of server-and-cli.md#errors a request earns."""
    path = sent.split(b" ", 2)[1].decode()
    answer = exchange(narrow, sent)
    assert answer.status == status
    assert message_of(path, answer).startswith(said)
    assert answer.json["error"]["type"] == INVALID


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("error", "status", "kind", "said"),
    [
        (GONE, 500, "api_error", SENTENCE),
        (
            RouteIncompleteError("layers 4-7", first_missing=4),
            503,
            "overloaded_error",
            "layers 4-7",
        ),
        (CapacityError("context", needed=9, available=8), 503, "overloaded_error", "context"),
    ],
)
def test_c21_failures_of_the_table(
    path: str, error: Ds4Error, status: int, kind: str, said: str
) -> None:
    """What fails before a byte was sent has a status, the engine's sentence and `Retry-After`.

    Differs from ds4: what will pass, such as an incomplete route, is a 503 and no 500.
    """
    with served(model("Hi", failures={0: error})) as (_, port):
        answer = post(port, path, asking(path))
    assert answer.status == status
    assert said in message_of(path, answer)
    assert answer.json["error"]["type"] == (kind if path == MESSAGES else INVALID)
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)


def while_busy(
    path: str, then: Callable[[int, Any], None], *, stream: bool = False
) -> tuple[bytes, bytes]:
    """Let one request run and one wait, do something, and return all that both were sent."""
    gate = Gate()
    with served(model("x" * 100, gate=gate), max_queue=1) as (http, port):
        running, waiting = connect(port), connect(port)
        with running, waiting:
            running.sendall(posting(path, asking(path, stream=True)))
            gate.let(3)
            begun = read_until(running, b"data: ")
            gate.wait_reached(4)
            waiting.sendall(posting(path, asking(path, stream=stream)))
            until(lambda: get(port, "/health").json["requests"]["waiting"] == 1)
            then(port, http)
            gate.open()
            return begun + read_all(running), read_all(waiting)


@pytest.mark.parametrize("path", POSTS)
def test_c13_a_full_queue(path: str) -> None:
    def overfill(port: int, _: Any) -> None:
        answer = post(port, path, asking(path))
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert "too many requests" in message_of(path, answer)
        kind = "rate_limit_error" if path == MESSAGES else INVALID
        assert answer.json["error"]["type"] == kind

    running, waiting = while_busy(path, overfill)
    assert parse(running).status == parse(waiting).status == 200


@pytest.mark.parametrize("path", POSTS)
def test_c66_a_server_that_stops_answers_who_waits(path: str) -> None:
    """Requests that wait when the server stops get 503 `server shutting down`."""
    _, waiting = while_busy(path, lambda _, http: http._jobs.close(DEADLINE / 100))
    answer = parse(waiting)
    assert (answer.status, message_of(path, answer)) == (503, "server shutting down")
    kind = "overloaded_error" if path == MESSAGES else INVALID
    assert answer.json["error"]["type"] == kind


@pytest.mark.parametrize("path", [*POSTS, f"{MESSAGES}/count_tokens", "/v1/models"])
def test_c10_a_configured_key_must_be_named(path: str) -> None:
    sent = request("GET", path) if path == "/v1/models" else posting(path, asking(CHAT))
    with saying("Hi", api_key="sesame") as port:
        answer = exchange(port, sent)
    assert answer.status == 401
    assert "no valid API key" in message_of(path, answer)
    kind = "authentication_error" if path.startswith(MESSAGES) else INVALID
    assert answer.json["error"]["type"] == kind
