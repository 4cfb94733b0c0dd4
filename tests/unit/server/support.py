"""What the server's tests share: a talking toy stack, apps and servers on loopback."""

import functools
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from ds4py.config import SamplingParams, ServerConfig
from ds4py.server.history.conversations import ConversationMemory
from ds4py.server.http.app import create_app, queue_of, save_sessions
from ds4py.server.http.server import HttpServer
from ds4py.server.requests.prompts import PromptWriter, TextStack
from ds4py.server.requests.request import (
    ChatMessage,
    CompletionPrompt,
    Conversation,
    GenerationRequest,
    Toolbox,
)
from ds4py.snapshot.disk_cache import DiskCache
from ds4py.text.chat_formats.template import ChatTemplate
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.fakes import FakeBackend
from tests.toys import bpe_metadata

DEADLINE = 10.0
"""Seconds after which a wait means a broken test."""

N_VOCAB = 279
EOS = 2
GREEDY = SamplingParams(temperature=0.0)
USER = [{"role": "user", "content": "hi"}]


@functools.cache
def text_stack() -> TextStack:
    metadata = bpe_metadata()
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.n_vocab == N_VOCAB
    return TextStack(tokenizer, ChatTemplate.from_metadata(metadata, tokenizer))


def script(text: str | bytes, *, end: bool = True) -> list[int]:
    """Tokens that spell `text` byte by byte, so that characters are split, then the end token."""
    tokenizer = text_stack().tokenizer
    by_byte = {tokenizer.token_bytes(token): token for token in reversed(range(N_VOCAB))}
    data = text.encode() if isinstance(text, str) else text
    return [by_byte[bytes([byte])] for byte in data] + [EOS] * end


def backend(says: str | bytes | Sequence[int] | None = "Hello world", **options) -> FakeBackend:
    """A fake model that always answers `says`."""
    tokens = script(says) if isinstance(says, str | bytes) else says
    return FakeBackend(n_vocab=N_VOCAB, script=tokens, **options)


def writer(text: TextStack, **limits: int) -> PromptWriter:
    """What writes prompts of a model without a memory."""
    fake = FakeBackend(**{"n_vocab": N_VOCAB, "n_ctx": 4096, **limits})
    return PromptWriter(text, fake, ServerConfig(), ConversationMemory())


def chat_ids(
    text: TextStack, messages: Sequence[ChatMessage], *, tools: Sequence[str] = (), **how
) -> tuple[int, ...]:
    """The prompt of a conversation."""
    parts = {"think": how.pop("think", None), "sampling": GREEDY, "max_tokens": 1}
    conversation = Conversation(tuple(messages), Toolbox(tuple(tools)), **how)
    return writer(text).write(GenerationRequest(prompt=conversation, **parts)).ids


def completion_ids(
    text: TextStack, content: str | tuple[int, ...], *, raw: bool = False, think: str | None = None
) -> tuple[int, ...]:
    """The prompt of a completion."""
    prompt = CompletionPrompt(content, raw)
    asked = GenerationRequest(prompt=prompt, think=think, sampling=GREEDY, max_tokens=1)
    return writer(text).write(asked).ids


@contextmanager
def client(fake: FakeBackend, *, n_sessions: int = 1, **config) -> Iterator[httpx.AsyncClient]:
    """An HTTP client that calls the application directly."""
    app = create_app(
        fake, text_stack(), ServerConfig(**{"sampling": GREEDY, **config}), n_sessions=n_sessions
    )
    try:
        yield httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy")
    finally:
        queue_of(app).close(DEADLINE)


@contextmanager
def server(
    fake: FakeBackend,
    *,
    text: TextStack | None = None,
    n_sessions: int = 1,
    listen: bool = True,
    disk: DiskCache | None = None,
    **config,
) -> Iterator[tuple[HttpServer, int]]:
    """A real server and its loopback port."""
    app = create_app(
        fake,
        text or text_stack(),
        ServerConfig(**{"sampling": GREEDY, **config}),
        n_sessions=n_sessions,
        disk=disk,
    )
    http = HttpServer(app)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if not listen:
        listener.close()
    http.start([listener] if listen else [])
    try:
        yield http, port
    finally:
        http.close(DEADLINE)
        save_sessions(app)


def sse(text: str) -> list[object]:
    """The payloads of an event stream; `[DONE]` and comments as they are."""
    payloads: list[object] = []
    for block in text.split("\n\n"):
        if block.startswith("data: {"):
            payloads.append(json.loads(block.removeprefix("data: ")))
        elif block:
            payloads.append(block.removeprefix("data: "))
    return payloads
