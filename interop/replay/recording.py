"""Recordings as values: who said what to whom, in which order.

Owns: reading `tests/golden/wire` into messages. Refuses to know: sockets, which party is live.
Invariant: a connection's frames stand in the order in which they passed the recording relay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from ds4py.activations import F32
from ds4py.wire.frames import coordinator_limits, hello_limits, worker_limits
from ds4py.wire.messages import ErrorText, SaveRequest, SnapshotChunk, WireMessage, decode
from tests import golden
from tests.strategies import read_frames

COORDINATOR: Final = "coordinator"
WORKERS: Final = ("worker A", "worker B")
"""Parties by their names in the manifests; workers in the order of the route."""

N_LAYERS: Final = 6
N_CTX: Final = 512
N_VOCAB: Final = 768
HIDDEN_WIDTH: Final = 1024
RAW_CAP: Final = 16
"""What the recorded programs, builds for the CPU, name as the room for raw rows: the window."""

LIMITS: Final = (
    worker_limits(N_CTX, HIDDEN_WIDTH)
    | coordinator_limits(N_VOCAB, HIDDEN_WIDTH, N_CTX)
    | hello_limits()
)
"""Every frame type that any party of the tiny model may send."""


@dataclass(frozen=True, slots=True)
class Said:
    """One frame.

    Args:
        by: The sending party.
        message: Its content; payloads are views into the recording.
    """

    by: str
    message: WireMessage


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One recorded connection; equal only to itself.

    Args:
        name: In the manifest: `ctl` or `data`, the worker's letter, a running number.
        connector: The party that dialled.
        acceptor: The party that was dialled.
        frames: In the order of the recording.
        closed_by: The party that closed first.
    """

    name: str
    connector: str
    acceptor: str
    frames: tuple[Said, ...]
    closed_by: str

    @property
    def is_control(self) -> bool:
        """Whether a worker introduced itself here."""
        return self.name.startswith("ctl")

    @property
    def number(self) -> int:
        """Which of the connections to the same listener this is."""
        return int(self.name.rpartition("-")[2])

    @property
    def refused(self) -> bool:
        """Whether it ended because of what the other side had said."""
        return any(isinstance(said.message, ErrorText) for said in self.frames)


@dataclass(frozen=True, slots=True)
class Call:
    """What the coordinator's user asked for.

    Args:
        name: Of the logits afterwards, in `Scenario.logits`.
        verb: "sync" gives a whole timeline, "eval" appends one token; "save" and "load".
        tokens: The whole timeline after the call.
    """

    name: str
    verb: Literal["sync", "eval", "save", "load"]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One recording.

    Args:
        name: Of its files.
        model: File in `tests/golden`.
        n_ctx: Context of the coordinator, in tokens.
        worker_ctx: Context of the workers.
        local_layers: The coordinator's own layers.
        worker_layers: Layers of each worker, in the order of `WORKERS`.
        bits: Packing of hidden states.
        chunk: Prompt tokens per chunk; None takes the default.
        calls: What the coordinator was asked for, in order.
        conversations: All connections.
        logits: What calls returned, `f32[V]` by name.
        saved: The payload that "save" returned and "load" was given.
    """

    name: str
    model: str
    n_ctx: int
    worker_ctx: int
    local_layers: str
    worker_layers: Mapping[str, str]
    bits: int
    chunk: int | None
    calls: tuple[Call, ...]
    conversations: tuple[Conversation, ...]
    logits: Mapping[str, F32]
    saved: bytes

    @property
    def parties(self) -> tuple[str, ...]:
        """Everybody who can be replaced by a live program."""
        return (COORDINATOR, *self.worker_layers)

    @property
    def has_remote_head(self) -> bool:
        """Whether logits come over the wire."""
        return any(layers.endswith("output") for layers in self.worker_layers.values())

    @property
    def own_cache(self) -> slice:
        """Bytes of `saved` that hold the cache of the coordinator's own layers.

        See docs/spec/wire-protocol.md#dsv4.
        """
        n_tokens = n_remote = 0
        for talk in self.conversations:
            request = talk.frames[0].message
            if not isinstance(request, SaveRequest):
                continue
            header = 56 + 8 * (request.layer_end + 1 - request.layer_start)
            chunks = (s.message.data for s in talk.frames if isinstance(s.message, SnapshotChunk))
            n_remote += sum(map(len, chunks)) - header
            n_tokens = request.token_count
        start = 52 + 4 * n_tokens + 4 * N_VOCAB + 8 * N_LAYERS
        return slice(start, len(self.saved) - n_remote)


def scenario_names() -> list[str]:
    """Return every recording that holds a conversation."""
    names = (re.fullmatch(r"wire/(\w+)\.json", name) for name in golden.manifest())
    return sorted(match[1] for match in names if match and match[1] != "errors")


@cache
def load(name: str) -> Scenario:
    """Read one recording."""
    manifest = golden.load_json(f"wire/{name}.json")
    setup = manifest["setup"]
    logits, saved = f"wire/{name}.logits.npz", f"wire/{name}.saved.dsv4"
    return Scenario(
        name=name,
        model=setup["model"],
        n_ctx=setup["ctx"],
        worker_ctx=setup.get("worker_ctx", setup["ctx"]),
        local_layers=setup["coordinator_layers"],
        worker_layers=dict(zip(WORKERS, setup["worker_layers"], strict=False)),
        bits=setup["activation_bits"],
        chunk=setup["prefill_chunk"],
        calls=tuple(_calls(manifest["results"])),
        conversations=tuple(_conversation(name, entry) for entry in manifest["connections"]),
        logits=golden.load_npz(logits) if logits in golden.manifest() else {},
        saved=golden.load_bytes(saved) if saved in golden.manifest() else b"",
    )


def _conversation(scenario: str, entry: dict[str, Any]) -> Conversation:
    parties = {"c2s": entry["connector"], "s2c": entry["acceptor"]}
    streams = {direction: _messages(scenario, entry["name"], direction) for direction in parties}
    closings = [direction for direction, what in entry["order"] if what == "closed"]
    return Conversation(
        name=entry["name"],
        connector=entry["connector"],
        acceptor=entry["acceptor"],
        frames=tuple(
            Said(parties[direction], streams[direction][what])
            for direction, what in entry["order"]
            if what != "closed"
        ),
        closed_by=parties[closings[0]],
    )


def _messages(scenario: str, connection: str, direction: str) -> list[WireMessage]:
    data = golden.load_bytes(f"wire/{scenario}.{connection}.{direction}.bin")
    return [decode(frame) for frame in read_frames(data, LIMITS)]


def _calls(results: Mapping[str, list[int] | str]) -> list[Call]:
    """Read what was asked: prompts, tokens appended one by one, a session saved and loaded."""
    calls: list[Call] = []
    saved: tuple[int, ...] = ()
    for key, tokens in results.items():
        if isinstance(tokens, str):  # the name of the saved session
            continue
        if key.startswith("prompt"):
            name = "prefill" if key == "prompt" else key.removeprefix("prompt_")
            calls.append(Call(name, "sync", tuple(tokens)))
            continue
        if key == "after_load":
            calls.append(Call("after_load", "load", saved))
        for index, token in enumerate(tokens):
            calls.append(Call(f"{key}_{index}", "eval", (*calls[-1].tokens, token)))
        if key == "before_save":
            saved = calls[-1].tokens
            calls.append(Call("at_save", "save", saved))
    return calls
