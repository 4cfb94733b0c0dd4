"""C66 to C68, C72 and C73: real programs, their statuses, what they print and how they stop."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from ds4py.bench.context_sweep import SweepPlan
from tests import golden
from tests.conformance.server.peer import CHAT, parse, posting, read_all, read_until
from tests.e2e.support import SHORT, Alone, endless_toy
from tests.processes import DEADLINE, Answer, Launcher, Server, run

EXACT = ("--precision", "f32", "-t", 1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_toy(tmp_path_factory.mktemp("toy") / "toy.gguf")


# --- the server -----------------------------------------------------------------------------------


def streaming(server: Server) -> socket.socket:
    """A client that is being sent an answer without an end."""
    host, port = server.address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=DEADLINE)
    sock.sendall(posting(CHAT, {"messages": SHORT, "stream": True, "temperature": 0}))
    return sock


def test_c66_a_clean_stop(toy: Path, tmp_path: Path) -> None:
    """The running stream ends with an error, what is live is saved, and the status is 0."""
    kept = tmp_path / "kv"
    disk = ("--kv-disk-dir", kept, "--kv-cache-min-tokens", 16)
    with Launcher(tmp_path / "programs") as launch:
        server = launch.server("-m", toy, "--http", "127.0.0.1:0", "--sessions", 1, *disk)
        server.wait_ready()
        with streaming(server) as sock:
            begun = read_until(sock, b"data: ", times=24)
            server.program.terminate()
            answer = parse(begun + read_all(sock))
            assert server.program.wait_exit() == 0
        log = server.program.log
    *chunks, last, done = answer.payloads
    assert len(chunks) > 20
    assert last["choices"][0]["finish_reason"] == "error"
    assert done == "[DONE]"
    reasons = [file.read_bytes()[5] for file in kept.glob("*.kv")]
    assert reasons.count(4) == 1, log  # saved because of the stop
    assert "Traceback" not in log


def test_c66_the_second_signal(toy: Path, tmp_path: Path) -> None:
    with Launcher(tmp_path / "programs") as launch:
        server = launch.server("-m", toy, "--http", "127.0.0.1:0", "--grace", 600)
        server.wait_ready()
        with streaming(server) as sock:
            read_until(sock, b"data: ", times=3)
            server.program.terminate()
            server.program.wait_log("stopping")
            server.program.terminate()
            assert server.program.wait_exit() == 130


# --- the terminal client --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("-p", "x", "--prompt-file", "y", "-m", "m.gguf"), 2, "--prompt"),
        (("-p", "x", "-m", "m.gguf", "--nonsense"), 2, "No such option"),
        (("-p", "x", "-m", "m.gguf", "--temp", "abc"), 2, "abc"),
        (("-p", "x", "-m", "/no/such/file.gguf"), 1, "/no/such/file.gguf"),
    ],
)
def test_c67_statuses(args: tuple[str, ...], status: int, words: str) -> None:
    done = run("ds4py-cli", *args)
    assert (done.status, done.out) == (status, b"")
    assert words in done.err


def test_c68_nothing_but_the_answer_on_stdout(toy: Path) -> None:
    asked = ("-m", toy, "-p", SHORT[0]["content"], "-n", 12, "--temp", 0, *EXACT)
    done = run("ds4py-cli", *asked)
    reference = Alone(toy)
    try:
        expected = reference.chat(SHORT, 12)
    finally:
        reference.close()
    assert done.status == 0
    assert done.out.decode(errors="replace").removesuffix("\n") == expected
    assert "prompt: " in done.err
    assert "t/s" in done.err


# --- the bench ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "frontiers"),
    [
        ({"start": 2048, "step": 2048, "stop": 8192}, [2048, 4096, 6144, 8192]),
        ({"start": 1000, "factor": 1.5, "stop": 4000}, [1000, 1500, 2250, 3375, 4000]),
    ],
)
def test_c72_frontiers(plan: Any, frontiers: list[int]) -> None:
    assert SweepPlan(**{"step": 1, "factor": 1.0, "gen_tokens": 1, **plan}).frontiers == frontiers


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """A walk of the tiny DeepSeek V4, whose caches are restored from snapshots."""
    book = tmp_path_factory.mktemp("book") / "book.txt"
    book.write_text("hello the world and " * 60)
    walk = ("--ctx-start", 32, "--ctx-max", 64, "--step-incr", 32, "--gen-tokens", 0)
    return run(
        "ds4py-bench", "-m", golden.path("tiny-a.gguf"), "--prompt-file", book, *walk, *EXACT
    )


def test_c72_the_header(measured: Answer) -> None:
    assert measured.status == 0, measured.err
    header = b"ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,kvcache_bytes"
    assert measured.out.split(b"\n")[0] == header


def test_c73_nothing_generated_needs_no_snapshot(measured: Answer) -> None:
    assert measured.status == 0, measured.err
    rows = [line.split(",") for line in measured.text.splitlines()[1:]]
    assert [(row[0], row[3], row[5]) for row in rows] == [("32", "0", "0"), ("64", "0", "0")]


def test_c73_a_short_prompt(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hello")
    asked = ("--prompt-file", tmp_path / "short.txt", "--ctx-start", 2048, *EXACT)
    done = run("ds4py-bench", "-m", golden.path("tiny-a.gguf"), *asked)
    assert done.status == 1
    assert "tokens in the prompt" in done.err
