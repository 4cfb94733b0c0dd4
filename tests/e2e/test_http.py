"""The official OpenAI client and plain HTTP against a coordinator and two worker processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ds4py.config import Address
from ds4py.wire.messages import Hello, encode
from tests.e2e.support import (
    ANY_PORT,
    LONG_IDS,
    N_CTX,
    SHORT,
    Alone,
    chat,
    client,
    complete,
    coordinator,
    evaluated,
    wait_idle,
    worker,
)
from tests.support.processes import (
    Launcher,
    Server,
    WorkerProgram,
    free_port,
    run,
    running,
    stage_sums,
    wait_for,
)

N_TOKENS = 24
CHUNK = 4


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("http")) as launch:
        yield launch


@pytest.fixture(scope="module")
def workers(launch: Launcher, toy: Path) -> list[WorkerProgram]:
    common = ("--dist-role", "worker", "--dist-listen", "127.0.0.1:0", "-m", toy)
    return [
        launch.worker(*common, "--dist-layers", layers, "--precision", "f32")
        for layers in ("0-2", "3-5")
    ]


@pytest.fixture(scope="module")
def server(launch: Launcher, workers: list[WorkerProgram], toy: Path) -> Server:
    built = launch.server(
        *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0", "-m", toy),
        *("--dist-route", ",".join(w.address for w in workers), "--dist-prefill-chunk", CHUNK),
        *("--precision", "f32"),
    )
    built.wait_ready()
    return built


# --- the official client -----------------------------------------------------------------------


def test_a_chat_answers_as_one_process(server: Server, alone: Alone) -> None:
    with client(server) as api:
        reply = api.chat.completions.create(
            model="toy",
            messages=SHORT,  # type: ignore[arg-type]
            max_tokens=N_TOKENS,
            temperature=0,
        )
    choice, n_prompt = reply.choices[0], len(alone.chat_ids(SHORT))
    assert choice.message.content == alone.chat(SHORT, N_TOKENS)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (n_prompt, N_TOKENS)


def test_a_chat_streams_the_same_text_in_pieces(server: Server, alone: Alone) -> None:
    with client(server) as api:
        stream = api.chat.completions.create(
            model="toy",
            messages=SHORT,  # type: ignore[arg-type]
            max_tokens=N_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    pieces = [c.choices[0].delta.content for c in chunks if c.choices]
    assert "".join(filter(None, pieces)) == alone.chat(SHORT, N_TOKENS)
    assert len([piece for piece in pieces if piece]) > N_TOKENS // 2
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == N_TOKENS


def test_completions_continue_text_and_token_ids(server: Server, alone: Alone) -> None:
    prompt = "hello the world"
    ids = alone.node.text.tokenizer.prompt_ids(prompt)
    with client(server) as api:
        streamed = api.completions.create(
            model="toy", prompt=prompt, max_tokens=N_TOKENS, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text == alone.text(ids, N_TOKENS)
    assert complete(server, ids, N_TOKENS) == text


def test_a_second_turn_reports_what_was_cached(server: Server, alone: Alone) -> None:
    first = [{"role": "user", "content": "in the world of the hello and an or"}]
    with client(server) as api:
        said = chat(server, first, 8)
        again = [*first, {"role": "assistant", "content": said}, *SHORT]
        reply = api.chat.completions.create(
            model="toy",
            messages=again,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
        )
    assert reply.choices[0].message.content == alone.chat(again, 8)
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert len(alone.chat_ids(first)) <= details.cached_tokens < reply.usage.prompt_tokens


def test_a_stop_text_ends_the_answer_before_it(server: Server, alone: Alone) -> None:
    whole = alone.chat(SHORT, N_TOKENS)
    stop = whole[10:12]
    with client(server) as api:
        reply = api.chat.completions.create(
            model="toy",
            messages=SHORT,  # type: ignore[arg-type]
            max_tokens=N_TOKENS,
            temperature=0,
            stop=stop,
        )
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_a_prompt_beyond_the_context_disturbs_no_worker(server: Server, alone: Alone) -> None:
    before = evaluated(wait_idle(server))
    with client(server) as api, pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="toy", prompt=[5] * N_CTX, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    body: Any = caught.value.body
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (N_CTX, N_CTX)
    assert f"{N_CTX} tokens" in str(caught.value)
    assert evaluated(server.health()) == before
    assert chat(server, SHORT, N_TOKENS) == alone.chat(SHORT, N_TOKENS)


def test_the_model_is_listed_with_its_context(server: Server) -> None:
    with client(server) as api:
        (model,) = api.models.list().data
    assert model.id == "toy llama"
    assert model.model_dump()["context_length"] == N_CTX


def test_two_clients_at_once_get_their_own_answers(server: Server, alone: Alone) -> None:
    other = [{"role": "user", "content": "an old hello in the red world"}]
    with client(server) as api:
        streams = [
            api.chat.completions.create(
                model="toy",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=200,
                temperature=0,
                stream=True,
            )
            for messages in (SHORT, other)
        ]
        texts = ["", ""]
        for chunks in zip(*streams, strict=False):
            for index, chunk in enumerate(chunks):
                texts[index] += chunk.choices[0].delta.content or ""
    assert alone.chat(SHORT, 200).startswith(texts[0])
    assert alone.chat(other, 200).startswith(texts[1])
    assert min(map(len, texts)) > 50


# --- clients that go -----------------------------------------------------------------------------


def open_stream(server: Server, prompt: list[int], n_tokens: int) -> socket.socket:
    """Send a streaming request over a plain socket, whose end nobody hides."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "stream": True}
    ).encode()
    host, port = server.address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return sock


def test_a_client_gone_in_the_answer_stops_the_work_at_once(
    server: Server, workers: list[WorkerProgram], alone: Alone
) -> None:
    """The last worker is held in the middle of a token; when it goes on, nothing follows."""
    wait_idle(server)
    with open_stream(server, LONG_IDS[:9], N_CTX) as sock:
        while b"data: " not in sock.recv(4096):
            pass
        workers[1].program.pause()
        held = stalled(server)
    wait_for_close(server)
    workers[1].program.resume()
    after = evaluated(wait_idle(server))
    assert after - held <= 2  # the token that was held, on two stages
    assert complete(server, LONG_IDS[:9], 12) == alone.text(LONG_IDS[:9], 12)


def test_a_client_gone_in_the_prompt_stops_the_work_at_once(
    server: Server, workers: list[WorkerProgram], alone: Alone
) -> None:
    """What was on its way may be finished: no more than a window of chunks."""
    wait_idle(server)
    base = evaluated(server.health())
    with open_stream(server, LONG_IDS, 1):
        wait_for(lambda: evaluated(server.health()) > base + 40, "the prefill is under way")
        workers[1].program.pause()
        held = stalled(server)
        assert running(server.health()) == 1
    wait_for_close(server)
    workers[1].program.resume()
    after = evaluated(wait_idle(server))
    window = 4  # two hops and two more
    assert after - held <= 2 * window * CHUNK
    assert after - base < 2 * len(LONG_IDS)
    assert complete(server, LONG_IDS[:50], 12) == alone.text(LONG_IDS[:50], 12)


def stalled(server: Server) -> int:
    """Wait until no more tokens are evaluated; how many there were."""
    counts = [-2, -1]

    def same() -> bool:
        counts.append(evaluated(server.health()))
        return counts[-1] == counts[-2] == counts[-3]

    wait_for(same, "the worker is held")
    return counts[-1]


def wait_for_close(server: Server) -> None:
    """Let the server's event loop go round: two requests, and it has seen what came before."""
    for _ in range(2):
        server.health()


# --- one port, or two -----------------------------------------------------------------------------


def test_the_port_of_http_takes_workers_too(server: Server) -> None:
    """A worker of another model gets an answer in DS4D where HTTP clients get theirs."""
    host, port = server.address.split(":")
    hello = Hello(
        model_id=7,
        quant_bits=4,
        layer_start=0,
        layer_end=2,
        has_output=0,
        has_hidden=1,
        ctx_size=N_CTX,
        n_layers=6,
        listen_port=1234,
        model_name=b"somebody else",
    )
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(b"".join(bytes(piece) for piece in encode(hello)))
        answer = b""
        while part := sock.recv(4096):
            answer += part
    assert answer.startswith(b"DS4D")
    assert b"model id mismatch: worker=7" in answer
    assert server.health()["status"] == "ok"


def test_health_names_what_is_missing_until_it_is_there(toy: Path, alone: Alone) -> None:
    with coordinator(toy) as local:
        health = local.health()
        assert health["http_status"] == 503
        assert health["missing"] == "layers 0-5 and the output head"
        answer = run("ds4py-cli", "--host", local.address, "-p", "hello")
        assert answer.status == 1
        assert answer.err.count("\n") == 1
        assert "no worker serves layers 0-5 and the output head" in answer.err
        with worker(toy, "0-2", coordinator=local.address):
            wait_for(lambda: len(local.health()["stages"]) == 2, "the first worker is known")
            health = local.health()
            assert (health["http_status"], health["status"]) == (503, "route incomplete")
            assert health["missing"] == "layers 3-5 and the output head"
            with client(local) as api, pytest.raises(openai.InternalServerError) as caught:
                api.chat.completions.create(model="toy", messages=SHORT)  # type: ignore[arg-type]
            assert caught.value.status_code == 503
            assert "layers 3-5 and the output head" in str(caught.value)
            with worker(toy, "3-5", coordinator=local.address):
                local.wait_ready()
                assert local.health()["http_status"] == 200
                assert chat(local, SHORT, 8) == alone.chat(SHORT, 8)


def test_http_elsewhere_is_turned_away_at_the_workers_door(toy: Path, alone: Alone) -> None:
    door = Address("127.0.0.1", free_port())
    with (
        coordinator(toy, http=ANY_PORT, listen=door) as local,
        worker(toy, "0-5", coordinator=door),
    ):
        local.wait_ready()
        assert local.address.port != door.port
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{door}/health", trust_env=False, timeout=30)
        assert chat(local, SHORT, 8) == alone.chat(SHORT, 8)


def test_stages_account_for_what_they_did(server: Server) -> None:
    complete(server, LONG_IDS[:40], 5)
    health = wait_idle(server)
    assert stage_sums(health, "decode_tokens") > 0
    assert stage_sums(health, "prefill_tokens") > 0
    assert all(stage["weight_bytes"] > 0 for stage in health["stages"][1:])
