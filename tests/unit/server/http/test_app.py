"""The application, called directly: routes, fields, errors, streams."""

import asyncio
import json
import logging

import pytest

from ds4py.errors import RemoteWorkError, RouteIncompleteError
from tests.support.fakes import Gate
from tests.unit.server.support import DEADLINE, N_VOCAB, USER, backend, client, script, sse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def ask(fake, method, path, *, config=None, **request):
    """One request to a fresh application."""

    async def go():
        with client(fake, **(config or {})) as http:
            async with asyncio.timeout(DEADLINE):
                return await http.request(method, path, **request)

    return asyncio.run(go())


def chat(fake, *, config=None, **fields):
    return ask(fake, "POST", CHAT, config=config, json={"messages": USER, **fields})


def complete(fake, *, config=None, **fields):
    return ask(fake, "POST", COMPLETIONS, config=config, json={"prompt": "abc", **fields})


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert response.text.endswith("}\n")
    return body["error"]


# --- routes ---------------------------------------------------------------------------------------


def test_health_is_ok_when_the_route_is_complete():
    response = ask(backend(), "GET", "/health")
    assert (response.status_code, response.json()["status"]) == (200, "ok")


def test_health_names_the_missing_layers():
    fake = backend()
    fake.missing = "layers 2-3 and the output head"
    response = ask(fake, "GET", "/health")
    assert response.status_code == 503
    assert response.json()["missing"] == "layers 2-3 and the output head"
    assert response.json()["stages"][0]["name"] == "coordinator"


def test_models_are_listed_and_found_by_name():
    listed = ask(backend(), "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["Fake Model"]
    assert ask(backend(), "GET", "/v1/models/Fake Model").json() == listed["data"][0]


def test_a_model_name_may_hold_slashes():
    config = {"model_alias": "org/model"}
    assert ask(backend(), "GET", "/v1/models/org/model", config=config).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nope"),
        ("GET", CHAT),
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("GET", "/v1/models/gpt-4"),
        ("GET", "/v1/models/"),
        ("POST", CHAT + "/"),
    ],
)
def test_everything_else_is_an_unknown_endpoint(method, path):
    response = ask(backend(), method, path)
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "unknown endpoint",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_head_is_no_endpoint():
    assert ask(backend(), "HEAD", "/health").status_code == 404


def test_the_query_is_ignored():
    assert ask(backend(), "GET", "/v1/models?beta=true").status_code == 200


def test_any_authorization_is_accepted():
    response = ask(backend(), "GET", "/v1/models", headers={"authorization": "Bearer x"})
    assert response.status_code == 200


def test_options_is_204_everywhere():
    response = ask(backend(), "OPTIONS", "/anything")
    assert (response.status_code, response.content) == (204, b"")
    assert "content-type" not in response.headers
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/nope", None),
        ("OPTIONS", "/x", None),
        ("POST", CHAT, {}),
        ("POST", CHAT, {"messages": USER, "stream": True}),
        ("POST", COMPLETIONS, {"prompt": "x"}),
    ],
)
def test_with_cors_every_reply_has_its_headers(method, path, body):
    response = ask(backend(), method, path, config={"cors": True}, json=body)
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
    assert response.headers["access-control-allow-headers"] == "*"


# --- whole replies --------------------------------------------------------------------------------


def test_a_chat_reply_has_exactly_its_keys():
    body = chat(backend("Hello"), model="whatever").json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    assert body["id"] == "chatcmpl-1"
    assert body["model"] == "whatever"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["completion_tokens"] == 5
    assert body["timings"]["predicted_n"] == 5


def test_a_completion_reply_has_exactly_its_keys():
    body = complete(backend("Hello")).json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    assert (body["id"], body["object"], body["model"]) == (
        "cmpl-1",
        "text_completion",
        "Fake Model",
    )
    assert body["choices"] == [{"text": "Hello", "index": 0, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 3


def test_an_empty_answer_is_an_empty_string():
    body = chat(backend(""), max_tokens=5).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"


def test_ids_count_up_over_all_endpoints():
    async def go():
        with client(backend("x")) as http:
            replies = [
                await http.post(CHAT, json={"messages": USER}),
                await http.post(COMPLETIONS, json={"prompt": "x"}),
                await http.post(CHAT, json={}),
                await http.post(CHAT, json={"messages": USER}),
            ]
            return [reply.json().get("id") for reply in replies]

    assert asyncio.run(go()) == ["chatcmpl-1", "cmpl-2", None, "chatcmpl-3"]


def test_token_ids_are_a_prompt():
    fake = backend("x")
    assert complete(fake, prompt=[5, 6, 7]).status_code == 200
    assert fake.sessions[0].evaluated[:3] == [5, 6, 7]


def test_foreign_token_ids_are_refused():
    response = complete(backend(), prompt=[5, N_VOCAB])
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "text", "finish"),
    [
        ({}, "Hello world", "stop"),
        ({"max_tokens": 4}, "Hell", "length"),
        ({"max_tokens": 0}, "", "length"),
        ({"max_tokens": -3}, "", "length"),
        ({"max_tokens": None}, "Hello world", "stop"),
        ({"stop": " w"}, "Hello", "stop"),
        ({"stop": ["zzz", "lo", "He"]}, "", "stop"),
        ({"stop": None}, "Hello world", "stop"),
        (
            {"temperature": 0, "top_k": 1, "top_p": 0.5, "min_p": 0.5, "seed": 1},
            "Hello world",
            "stop",
        ),
    ],
)
def test_fields_shape_the_answer(fields, text, finish):
    choice = chat(backend("Hello world"), **fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, finish)
    choice = complete(backend("Hello world"), **fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, finish)


def test_max_completion_tokens_limits_a_chat():
    assert chat(backend("Hello"), max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_the_server_has_its_own_budget():
    body = chat(backend("Hello"), config={"max_tokens": 3}).json()
    assert body["usage"]["completion_tokens"] == 3


def test_a_seed_is_reproducible():
    def text(seed):
        body = complete(backend(None), temperature=1.5, seed=seed, max_tokens=20).json()
        return body["choices"][0]["text"]

    assert text(7) == text(7)
    assert text(7) != text(8)


def test_a_second_turn_reports_cached_tokens():
    async def go():
        with client(backend("Hi")) as http:
            first = (await http.post(CHAT, json={"messages": USER})).json()
            turns = [*USER, {"role": "assistant", "content": "Hi"}, *USER]
            second = (await http.post(CHAT, json={"messages": turns})).json()
            return first["usage"], second["usage"]

    first, second = asyncio.run(go())
    details = second["prompt_tokens_details"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert details["cached_tokens"] >= first["prompt_tokens"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == second["prompt_tokens"]


# --- streams --------------------------------------------------------------------------------------


def test_a_chat_stream_has_its_order():
    response = chat(backend("Hey"), stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, end = sse(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [
        {"role": "assistant"},
        {"content": "H"},
        {"content": "e"},
        {"content": "y"},
        {},
    ]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert finishes == [None, None, None, None, "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["timings"]["predicted_n"] == 3
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert end == "[DONE]"


def test_a_completion_stream_has_its_order():
    response = complete(backend("Hey"), stream=True, stream_options={"include_usage": True})
    *chunks, usage, end = sse(response.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["H", "e", "y", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert (usage["choices"], end) == ([], "[DONE]")


@pytest.mark.parametrize("say", [chat, complete])
def test_token_ids_come_beside_the_text_if_asked_for(say):
    """Also those of tokens that are half a character and so show no text yet."""
    tokens = script("aé", end=False)
    assert len(tokens) == 3
    whole = say(backend("aé"), return_token_ids=True).json()["choices"][0]
    assert whole["token_ids"] == tokens
    *chunks, _ = sse(say(backend("aé"), return_token_ids=True, stream=True).text)
    streamed = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [token for ids in streamed for token in ids] == tokens
    assert "token_ids" not in say(backend("aé")).json()["choices"][0]


def test_progress_of_the_prompt_is_told_in_comments_if_asked_for():
    fields = {"prompt": "a long prompt of many tokens", "max_tokens": 1, "stream": True}
    told = complete(backend("x"), return_progress=True, **fields).text
    comments = [line for line in told.splitlines() if line.startswith(":")]
    done = [int(line.removeprefix(": prefill ").split("/")[0]) for line in comments]
    (n_prompt,) = {int(line.split("/")[1]) for line in comments}
    assert len(done) > 2
    assert done == sorted(done)
    assert done[-1] == n_prompt
    assert told.index(comments[-1]) < told.index("data: ")
    assert ":" not in {line[:1] for line in complete(backend("x"), **fields).text.splitlines()}


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": None}])
def test_usage_is_streamed_only_on_request(options):
    chunks = sse(chat(backend("Hey"), stream=True, **options).text)[:-1]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("fields", [{}, {"stop": "wor"}, {"max_tokens": 3}, {"stop": ["d€"]}])
def test_a_stream_says_what_the_whole_reply_says(fields):
    says = "Hello wörld€ and more"
    whole = chat(backend(says), **fields).json()["choices"][0]
    chunks = sse(chat(backend(says), stream=True, **fields).text)[:-1]
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_silence_before_the_first_token_is_filled_with_comments():
    gate = Gate()

    async def go():
        with client(backend("Hey", gate=gate), keepalive_seconds=0.02) as http:
            asking = asyncio.create_task(http.post(CHAT, json={"messages": USER, "stream": True}))
            await asyncio.to_thread(gate.wait_reached, 1)
            await asyncio.sleep(0.05)  # a later timer of the same loop than the keepalive
            gate.open()
            return sse((await asking).text)

    payloads = asyncio.run(go())
    assert payloads[0] == ": prefill"
    roles = [part for part in payloads if isinstance(part, dict)]
    assert roles[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert payloads[-1] == "[DONE]"


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_incomplete_route_is_a_503(stream):
    lost = RouteIncompleteError("layers 2-3", first_missing=2)
    response = chat(backend(failures={0: lost}), stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = error_of(response)
    assert (error["code"], error["type"]) == ("route_incomplete", "invalid_request_error")
    assert "layers 2-3" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_prompt_is_a_500_with_its_sentence(stream):
    response = chat(backend(failures={0: RemoteWorkError("no", hop="worker1")}), stream=stream)
    assert response.status_code == 500
    assert error_of(response)["message"] == "worker1 refused the work: no"


def test_a_bug_is_a_500_without_details(caplog):
    response = chat(backend(failures={0: ZeroDivisionError("secret")}))
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert "secret" in caplog.text


def test_a_bug_in_a_handler_is_a_500_without_details(caplog, monkeypatch):
    fake = backend()
    monkeypatch.setattr(fake, "health", lambda: 1 / 0)
    response = ask(fake, "GET", "/health")
    assert response.status_code == 500
    assert error_of(response)["type"] == "invalid_request_error"
    assert "ZeroDivisionError" in caplog.text


def test_a_bug_in_the_middle_of_a_stream_breaks_the_connection(caplog, monkeypatch):
    monkeypatch.setattr("ds4py.server.api.chat.response.costs_of", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the server below closes on it
        chat(backend("Hi"), stream=True, stream_options={"include_usage": True})
    assert "ZeroDivisionError" in caplog.text


def test_a_failed_prompt_after_a_comment_is_an_error_event():
    gate = Gate()
    lost = RemoteWorkError("no", hop="worker1")

    async def go():
        with client(backend(gate=gate, failures={0: lost}), keepalive_seconds=0.01) as http:
            asking = asyncio.create_task(http.post(CHAT, json={"messages": USER, "stream": True}))
            await asyncio.to_thread(gate.wait_reached, 1)
            await asyncio.sleep(0.05)  # a later timer of the same loop than the keepalive
            gate.open()
            return await asking

    response = asyncio.run(go())
    assert response.status_code == 200
    assert response.text.startswith(": prefill\n\n")
    event, data, *rest = response.text.rstrip("\n").rsplit("\n\n", 1)[-1].split("\n")
    assert (event, rest) == ("event: error", [])
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("worker1 refused the work: no", "server_error")


def test_a_failure_during_decode_ends_with_finish_error():
    lost = RemoteWorkError("no", hop="worker1")
    body = chat(backend("Hello", failures={5: lost}, chunk=100)).json()
    assert body["choices"][0]["message"]["content"] == "Hello"[:5]
    assert body["choices"][0]["finish_reason"] == "error"
    assert body["error"]["message"] == "worker1 refused the work: no"


def test_a_stream_that_fails_during_decode_ends_with_finish_error_and_done():
    lost = RemoteWorkError("no", hop="worker1")
    response = chat(backend("Hello", failures={2: lost}, chunk=100), stream=True)
    *_, last, end = sse(response.text)
    assert last["choices"][0]["finish_reason"] == "error"
    assert last["error"]["message"] == "worker1 refused the work: no"
    assert end == "[DONE]"


def test_the_next_request_after_a_failure_is_served():
    lost = RemoteWorkError("no", hop="worker1")

    async def go():
        with client(backend("Hi", failures={0: lost})) as http:
            first = await http.post(CHAT, json={"messages": USER})
            second = await http.post(CHAT, json={"messages": USER})
            return first.status_code, second.json()["choices"][0]["message"]["content"]

    assert asyncio.run(go()) == (500, "Hi")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_disturbs_nobody(stream):
    fake = backend(n_ctx=32)
    long = [{"role": "user", "content": "x" * 100}]
    response = chat(fake, messages=long, stream=stream)
    assert response.status_code == 400
    error = error_of(response)
    n_prompt = error["n_prompt_tokens"]
    assert n_prompt > 100
    assert error == {
        "message": f"Prompt has {n_prompt} tokens, but the configured context size is 32 tokens",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
        "n_prompt_tokens": n_prompt,
        "n_ctx": 32,
    }
    assert fake.sessions[0].n_evaluations == 0


def test_a_prompt_of_all_but_one_token_is_served():
    assert complete(backend("Hi", n_ctx=4)).json()["usage"]["completion_tokens"] == 1
    refused = complete(backend("Hi", n_ctx=3))
    assert error_of(refused)["param"] == "prompt"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_json_is_a_400(path, body):
    response = ask(backend(), "POST", path, content=body)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("invalid JSON request")


@pytest.mark.parametrize(("path", "what"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_what_is_missing_is_a_400(path, what):
    response = ask(backend(), "POST", path, json={"model": "x"})
    assert (response.status_code, error_of(response)["message"]) == (400, f"missing {what}")


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not():
    body = json.dumps({"prompt": "abc"}).encode().ljust(1000)
    config = {"max_body_bytes": 1000}
    assert ask(backend(), "POST", COMPLETIONS, config=config, content=body).status_code == 200
    response = ask(backend(), "POST", COMPLETIONS, config=config, content=body + b" ")
    assert response.status_code == 413
    error = error_of(response)
    assert error["code"] == "request_too_large"
    assert error["message"] == "request body: got 1001 bytes, expected at most 1000"


def test_a_chunked_body_is_limited_too():
    async def parts():
        for _ in range(20):
            yield b" " * 100

    response = ask(backend(), "POST", COMPLETIONS, config={"max_body_bytes": 1000}, content=parts())
    assert response.status_code == 413


def test_a_chunked_body_is_read():
    async def parts():
        yield b'{"prompt":'
        yield b'"abc"}'

    assert ask(backend(), "POST", COMPLETIONS, content=parts()).status_code == 200


def test_a_full_queue_is_a_429_and_the_queued_are_served():
    gate = Gate()

    async def go():
        with client(backend("Hi", gate=gate), max_queue=1) as http:
            served = [asyncio.create_task(http.post(CHAT, json={"messages": USER}))]
            await asyncio.to_thread(gate.wait_reached, 1)
            served.append(asyncio.create_task(http.post(CHAT, json={"messages": USER})))
            for _ in range(1000):
                load = (await http.get("/health")).json()["requests"]
                if load == {"running": 1, "waiting": 1}:
                    break
                await asyncio.sleep(0.01)
            refused = await http.post(CHAT, json={"messages": USER})
            gate.open()
            return refused, [(await one).status_code for one in served]

    refused, served = asyncio.run(asyncio.wait_for(go(), DEADLINE))
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "queue_full"
    assert refused.headers["retry-after"]
    assert served == [200, 200]


def test_models_answer_while_the_model_is_busy():
    gate = Gate()

    async def go():
        with client(backend("Hi", gate=gate)) as http:
            busy = asyncio.create_task(http.post(CHAT, json={"messages": USER}))
            await asyncio.to_thread(gate.wait_reached, 1)
            answered = (await http.get("/v1/models")).status_code
            assert not busy.done()
            gate.open()
            await busy
            return answered

    assert asyncio.run(asyncio.wait_for(go(), DEADLINE)) == 200


def test_several_sessions_generate_at_once():
    gate = Gate()

    async def go():
        fake = backend("Hi", n_sessions=2, gate=gate)
        with client(fake, n_sessions=2) as http:
            both = [asyncio.create_task(http.post(CHAT, json={"messages": USER})) for _ in "ab"]
            await asyncio.to_thread(gate.wait_reached, 2)
            gate.open()
            return [(await one).status_code for one in both]

    assert asyncio.run(asyncio.wait_for(go(), DEADLINE)) == [200, 200]


def test_each_request_leaves_one_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="ds4py.server")
    chat(backend("Hello"))
    (record,) = [one for one in caplog.records if one.levelno == logging.INFO]
    line = record.getMessage()
    assert line.startswith("chatcmpl-1 /v1/chat/completions: prompt ")
    assert "completion 5" in line
    assert line.endswith("finish stop")


def test_a_failed_request_leaves_its_line_too(caplog):
    caplog.set_level(logging.INFO, logger="ds4py.server")
    chat(backend(failures={0: RemoteWorkError("no", hop="worker1")}))
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]
    assert line.startswith("chatcmpl-1 ")
    assert line.endswith("finish error: worker1 refused the work: no")


def test_characters_arrive_whole():
    chunks = sse(chat(backend(script("né€😀")), stream=True).text)[1:-2]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert texts == ["n", "é", "€", "😀"]


@pytest.mark.parametrize(("strict", "status"), [(True, 400), (False, 200), (None, 200)])
def test_what_cannot_be_enforced_of_a_schema_is_refused_only_if_it_is_strict(strict, status):
    schema = {"type": "string", "format": "secret", "maxLength": 2}
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    assert chat(backend(), response_format=form).status_code == status


@pytest.mark.parametrize(
    ("path", "member"),
    [
        (CHAT, "messages"),
        (COMPLETIONS, "prompt"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_what_is_too_long_is_blamed_on_its_own_member(path, member):
    said = "x" * 300
    body = {member: [{"role": "user", "content": said}]}
    body = {member: said} if member in ("prompt", "input") else body
    response = ask(backend(n_ctx=64), "POST", path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith("Prompt has 3")
    if path != "/v1/messages":  # errors of that API name no member
        assert (error["code"], error["param"]) == ("context_length_exceeded", member)
