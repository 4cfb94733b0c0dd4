"""What end-to-end tests share: models that never fall silent, references, nodes in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import openai

from ds4py.cli import exits
from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    PrefillTuning,
    RouteEntry,
    SamplingParams,
    ServerConfig,
    SocketConfig,
    WorkerConfig,
)
from ds4py.generation.loop import Token, generate
from ds4py.generation.sampling import Sampler
from ds4py.gguf.file import GgufFile
from ds4py.layer_range import LayerSpec
from ds4py.runtime import (
    Node,
    open_disk_cache,
    open_listeners,
    open_node,
    open_worker,
    serve_http,
)
from ds4py.snapshot.disk_cache import DiskCacheOptions
from ds4py.worker.worker import Worker
from tests.processes import Server, WorkerProgram, read_health, running, stage_sums, wait_for
from tests.toys import toy_llama

ANY_PORT = Address("127.0.0.1", 0)
SOCKETS = SocketConfig(buffer_mb=0, send_timeout=20)
GREEDY = SamplingParams(temperature=0)
N_CTX = 4096
SHORT = [{"role": "user", "content": "hello the world and the world"}]
LONG_IDS = [3 + (7 * k * k + k) % 250 for k in range(3000)]
"""A prompt that takes seconds in small chunks, and no prefix of which repeats."""


def endless_toy(path: Path, **shape: Any) -> Path:
    """A toy whose greedy answers never end: the embeddings of its end tokens are zero, and with a
    tied head no zero logit is ever the largest."""
    toy_llama(path, **{"n_layers": 6, "n_ctx": N_CTX, **shape})
    with GgufFile.open(path) as file:
        embedding = file.info("token_embd.weight")
    assert embedding.type_name == "F32"
    row = 4 * embedding.dims[0]
    with path.open("r+b") as out:
        for end_token in (0, 2):
            out.seek(embedding.offset + end_token * row)
            out.write(bytes(row))
    return path


def engine(model: Path, *, n_slots: int = 4, n_ctx: int | None = None) -> EngineConfig:
    """One thread, exact arithmetic."""
    return EngineConfig(model=model, precision="f32", n_slots=n_slots, n_ctx=n_ctx, threads=1)


class Alone:
    """The truth: one process with all layers.

    Args:
        model: The file.
    """

    def __init__(self, model: Path):
        self._stack = ExitStack()
        config = CoordinatorConfig(n_sessions=1)
        self.node = self._stack.enter_context(
            open_node(engine(model, n_slots=1), config, SOCKETS, whole=True)
        )

    def close(self) -> None:
        self._stack.close()

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        return self.node.text.chat.render_ids(list(messages))

    def greedy(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """The greedy answer in token ids."""
        with self.node.backend.lease(prompt) as session:
            steps = generate(
                session, prompt, sampler=Sampler(GREEDY), eos_ids=(), max_tokens=n_tokens
            )
            return [step.id for step in steps if isinstance(step, Token)]

    def text(self, prompt: Sequence[int], n_tokens: int) -> str:
        """The greedy answer as text."""
        tokens = self.greedy(prompt, n_tokens)
        return self.node.text.tokenizer.decode(tokens).decode(errors="replace")

    def chat(self, messages: Sequence[dict[str, str]], n_tokens: int) -> str:
        """The greedy answer to a conversation."""
        return self.text(self.chat_ids(messages), n_tokens)


def route(*workers: Worker | WorkerProgram | str) -> tuple[RouteEntry, ...]:
    """Entries of `--dist-route`."""
    return tuple(
        RouteEntry.parse(w)
        if isinstance(w, str)
        else RouteEntry(Address("127.0.0.1", w.address.port if isinstance(w, Worker) else w.port))
        for w in workers
    )


@contextmanager
def worker(
    model: Path,
    layers: str,
    *,
    listen: Address = ANY_PORT,
    coordinator: Address | None = None,
    sockets: SocketConfig = SOCKETS,
) -> Iterator[Worker]:
    """A worker in this process."""
    config = WorkerConfig(layers=LayerSpec.parse(layers), listen=listen, coordinator=coordinator)
    with open_worker(engine(model), config, sockets) as served:
        yield served


@dataclass(frozen=True)
class LocalServer:
    """A coordinator with HTTP in this process."""

    node: Node
    address: Address

    def health(self) -> dict[str, Any]:
        return read_health(str(self.address))

    def wait_ready(self) -> None:
        wait_for(lambda: self.health()["status"] == "ok", "the route is complete")


@contextmanager
def coordinator(
    model: Path,
    *,
    chunk: int | None = None,
    http: Address | None = None,
    sockets: SocketConfig = SOCKETS,
    disk: tuple[Path, DiskCacheOptions] | None = None,
    **config: Any,
) -> Iterator[LocalServer]:
    """A coordinator with HTTP in this process.

    Args:
        chunk: Prompt tokens per chunk.
        http: An address of its own for HTTP.
        disk: Folder and limits of a disk cache.
        config: Fields of `CoordinatorConfig`.
    """
    config = {"listen": ANY_PORT, "prefill": PrefillTuning(chunk=chunk), **config}
    built, front = CoordinatorConfig(**config), ServerConfig(address=http)
    with (
        open_listeners(built, front, sockets) as listeners,
        open_node(engine(model), built, sockets) as node,
        serve_http(node, listeners, front, disk=disk and open_disk_cache(*disk, node, "auto")),
    ):
        yield LocalServer(node, listeners.http_addresses[0])


def client(server: Server | LocalServer) -> openai.OpenAI:
    """The official client, never through a proxy and never trying twice."""
    return openai.OpenAI(
        base_url=f"http://{server.address}/v1",
        api_key="unused",
        max_retries=0,
        timeout=90,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def complete(server: Server | LocalServer, prompt: Sequence[int], n_tokens: int) -> str:
    """The greedy continuation of token ids."""
    with client(server) as api:
        reply = api.completions.create(
            model="toy", prompt=list(prompt), max_tokens=n_tokens, temperature=0
        )
    return reply.choices[0].text


def chat(server: Server | LocalServer, messages: Sequence[Any], n_tokens: int) -> str:
    """The greedy answer to a conversation."""
    with client(server) as api:
        reply = api.chat.completions.create(
            model="toy", messages=list(messages), max_tokens=n_tokens, temperature=0
        )
    return str(reply.choices[0].message.content)


def wait_idle(server: Server | LocalServer) -> dict[str, Any]:
    """Wait until no request runs; what `/health` says then."""
    wait_for(lambda: running(server.health()) == 0, "every request has ended")
    return server.health()


def evaluated(health: dict[str, Any]) -> int:
    """Tokens that all stages together have evaluated, in prefill and decode."""
    return stage_sums(health, "prefill_tokens") + stage_sums(health, "decode_tokens")


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Undo what a program does to the log of this process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def command(program: click.Command, name: str, *args: object) -> int:
    """Run a program's command in this process; its exit status."""
    with quiet_logging():
        return exits.exit_status(program, name, [str(arg) for arg in args])
