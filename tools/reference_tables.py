"""What the reference tells beside the flags: environment, exit statuses, HTTP.

Owns: these tables, as data. Refuses to know: how they are written. Invariant: names, paths and
codes are those of the programs; `tests/unit/tools/test_reference.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ds4py.cli import exits

VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    "DS4PY_API_KEY": ("text", "What `--api-key` of `ds4py-cli` says otherwise."),
    "DS4_LOCK_FILE": (
        "path",
        "Only one process at a time may hold this file while it has a model.",
    ),
    "DS4_DIST_PREFILL_CHUNK": ("1 or more [measured]", "As `--dist-prefill-chunk`, which wins."),
    "DS4_DIST_PREFILL_WINDOW": (
        "1 to 64 [stages behind the coordinator + 2, within 2 to 8]",
        "As `--dist-prefill-window`, which wins.",
    ),
    "DS4_DIST_PREFILL_SEND_DEPTH": ("1 to 8 [2]", "Chunks that may wait to be sent."),
    "DS4_METAL_PREFILL_CHUNK": (
        "tokens, 0 is the context [4096]",
        "Most tokens of one span; saved sessions name it.",
    ),
    "DS4_METAL_GRAPH_RAW_CAP": (
        "1 or more [as a GPU node of ds4]",
        "Room for raw rows that saved sessions of DeepSeek V4 name.",
    ),
    "DS4_DIST_SOCKET_BUFFER_MB": ("0 to 512 [128]", "Socket buffers, MiB; 0 is the system's size."),
    "DS4_DIST_SOCKET_TIMEOUT_SEC": ("1 to 3600 [60]", "Seconds without progress that end a send."),
    "DS4_DIST_SOCKET_RECV_TIMEOUT_SEC": (
        "1 to 3600 [none]",
        "Seconds of silence that end a connection.",
    ),
    "DS4_DIST_CONNECT_BIND_HOST": ("address", "Source address of outgoing connections."),
    "DS4_DIST_CONNECT_BIND_IF": ("name", "Network interface of outgoing connections."),
    "DS4_DIST_CONNECT_TRACE": ("set", "Log every attempt to connect."),
    "DS4_DIST_WORKER_PREFETCH_DEPTH": (
        "1 to 8 [2]",
        "Spans of a connection that may wait for a worker's device.",
    ),
    "DS4_DIST_WORKER_FORWARD_WINDOW": (
        "1 to 64 [4]",
        "Spans that a worker may have outstanding at the next one.",
    ),
    "DS4_DIST_DISABLE_WORKER_PREFETCH": ("set", "One span at a time for each connection."),
    "DS4_DIST_DISABLE_BATCHING": ("set", "Tokens of different sessions do not run together."),
    "DS4_DIST_DISABLE_PREFILL_PIPELINE": ("set", "Chunks of a prompt do not overlap."),
    "DS4_DIST_DISABLE_PREFILL_ACK_ONLY": ("set", "Every chunk is answered in full."),
    "DS4_DIST_DECODE_PROFILE": ("set", "Log where the time of each token went."),
}
"""Name -> values and, in brackets, what holds without it; meaning."""

EXITS: Final[Mapping[int, str]] = {
    exits.OK: "Done, or stopped as asked (a server by SIGTERM or Ctrl+C).",
    exits.FAILED: "It was tried and failed: a file, a model, or a peer.",
    exits.BAD_USAGE: "A flag, a variable or their combination cannot be used; nothing was done.",
    exits.INTERRUPTED: "Interrupted before it was done.",
}

ENDPOINTS: Final[Sequence[tuple[str, str, str]]] = (
    ("POST", "`/v1/chat/completions`", "OpenAI Chat Completions"),
    ("POST", "`/v1/completions`", "OpenAI Completions"),
    ("POST", "`/v1/responses`", "OpenAI Responses; nothing is stored"),
    ("POST", "`/v1/messages`", "Anthropic Messages"),
    ("POST", "`/v1/messages/count_tokens`", "tokens of the prompt that such a body makes"),
    ("GET", "`/v1/models`, `/v1/models/{name}`", "what is served, and its context"),
    ("GET", "`/health`", "200 when the whole model can be reached, 503 and what is missing if not"),
    ("GET", "`/stats`", "figures for the console, as JSON"),
    ("GET", "`/metrics`", "figures for Prometheus (metrics.md)"),
    ("GET", "`/`, `/console/...`", "the console (console.md)"),
)

STATUSES: Final[Mapping[int, str]] = {
    200: "An answer, also one that broke off while it was sent: the body then says so.",
    204: "`OPTIONS`.",
    400: "The request is not HTTP, not JSON, or says what cannot be done; the sentence says what.",
    401: "The server has an API key and the request does not name it. `/`, `/console/`, `/health` "
    "and `OPTIONS` need none.",
    404: "`unknown endpoint`.",
    413: "The body has more than 64 MiB.",
    429: "The queue is full (`--max-queue`); `Retry-After` is set.",
    500: "The work failed; the log says more.",
    503: "It cannot be done now: layers or memory are missing, the time limit has passed, or the "
    "server stops; `Retry-After` is set.",
}

CODES: Final[Sequence[tuple[str, str, str]]] = (
    ("context_length_exceeded", "400", "The prompt does not leave room for one token."),
    ("invalid_messages", "400", "The model's chat template refuses the conversation."),
    ("tools_not_supported", "400", "The model's chat format has no place for tools."),
    ("invalid_api_key", "401", "See the statuses."),
    ("request_too_large", "413", "See the statuses."),
    ("queue_full", "429", "See the statuses."),
    ("route_incomplete", "503", "Nobody serves some layers."),
    ("capacity_exhausted", "503", "The cache memory of a stage does not hold the conversation."),
    ("server_busy", "503", "Too many requests, or too many bytes of them, are being read."),
    ("time_limit", "503", "`--request-timeout` passed before the prompt was evaluated."),
    ("shutting_down", "503", "The server stops."),
    ("cancelled", "503", "The work was given up while the server stopped."),
)
