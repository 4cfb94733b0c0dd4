"""Stages that cost nothing, as programs: what is left is wire, threads and Python.

Owns: a slice that computes nothing, its model, and a sender of large frames. Refuses to know: what
is timed. Invariant: frames have the sizes of DeepSeek V4 Flash, 64 KiB of hidden state a token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

from ds4py.activations import F32, HiddenBatch
from ds4py.config import Address, SocketConfig, WorkerConfig
from ds4py.contracts import (
    ForwardOutput,
    ForwardRequest,
    ModelCard,
    OutputKind,
    PendingForward,
    SessionId,
)
from ds4py.errors import Ds4Error, SnapshotError
from ds4py.layer_range import LayerRange, LayerSpec
from ds4py.transport.acceptor import Acceptor, CallerLimits
from ds4py.transport.connection import Connection
from ds4py.transport.sockets import Listener
from ds4py.wire.frames import FrameType, encode_header
from ds4py.worker.worker import Worker

WIDTH: Final = 16384
"""Values of a token of DeepSeek V4 Flash between layers."""

N_CTX: Final = 4096
LOOPBACK: Final = Address("127.0.0.1", 0)
_N_VOCAB: Final = 256


def null_card(n_layers: int) -> ModelCard:
    """Return the identity of a model that is not there."""
    return ModelCard(
        model_id=0x80000001,
        name="stub",
        architecture="stub",
        n_layers=n_layers,
        n_vocab=_N_VOCAB,
        hidden_width=WIDTH,
        n_ctx_train=N_CTX,
        quant_bits=4,
    )


class NullRunner:
    """A `contracts.ModelRunner` that hands back what it got, or the same logits each time."""

    n_ctx = N_CTX
    n_slots = 4
    can_rewind = True
    weight_bytes = 0
    overlaps = False

    def __init__(self, layers: LayerRange, n_layers: int):
        self.layers = layers
        self.has_head = layers.has_output
        self.card = null_card(n_layers)
        self._row = HiddenBatch.pack(np.ones((1, WIDTH), np.float32), 32)
        self._logits = np.zeros(_N_VOCAB, np.float32)
        self._lengths: dict[SessionId, int] = {}

    def run(self, batch: Sequence[ForwardRequest]) -> list[ForwardOutput | Ds4Error]:
        """Answer each span of one token from what is there already."""
        return [self._answer(work) for work in batch]

    def forward_async(self, batch: Sequence[ForwardRequest]) -> PendingForward:
        """Answer each span; nothing is on its way afterwards."""
        answers = self.run(batch)
        return PendingForward(refused={}, complete=lambda: answers, ready=lambda: True)

    def _answer(self, work: ForwardRequest) -> ForwardOutput:
        self._lengths[work.session] = work.pos0 + len(work.tokens)
        match work.output_kind:
            case OutputKind.LOGITS:
                return ForwardOutput(logits=self._logits)
            case OutputKind.HIDDEN:
                return ForwardOutput(hidden=work.hidden or self._row)
            case OutputKind.NOTHING:
                return ForwardOutput()

    def apply_head(self, row: HiddenBatch) -> F32:
        """Return the same logits for any row."""
        del row
        return self._logits

    def length(self, session: SessionId) -> int | None:
        """Return how many tokens the session would hold."""
        return self._lengths.get(session)

    def rewind(self, session: SessionId, n_tokens: int) -> None:
        """Cut a session."""
        self._lengths[session] = n_tokens

    def drop(self, session: SessionId) -> None:
        """Forget a session."""
        self._lengths.pop(session, None)

    def reserve(self, session: SessionId, n_tokens: int) -> None:
        """Take nothing: a session costs no memory."""

    def fork(self, source: SessionId, target: SessionId, n_tokens: int) -> None:
        """Let a session have a length of its own."""
        del source
        self._lengths[target] = n_tokens

    def save_cache(self, session: SessionId) -> list[memoryview]:
        """Refuse: there is no cache."""
        raise SnapshotError(f"session {session}: a stub has no cache")

    def load_cache(self, session: SessionId, n_tokens: int, payload: memoryview) -> None:
        """Refuse: there is no cache."""
        raise SnapshotError(f"{session}: no cache for {n_tokens} tokens, {len(payload)} bytes")

    def close(self) -> None:
        """Free nothing."""


def serve_stage(layer: int, n_layers: int) -> None:
    """Be a worker with one layer until stdin ends; says its port."""
    layers = LayerRange(layer, layer, has_output=layer == n_layers - 1)
    config = WorkerConfig(layers=LayerSpec(layer, layer), listen=LOOPBACK)
    worker = Worker(NullRunner(layers, n_layers), config, SocketConfig())
    worker.start()
    _say(worker.address.port)
    sys.stdin.read()
    worker.close()


def send_frames(n_bytes: int) -> None:
    """Send a frame with a body of so many bytes for each that arrives, until stdin ends."""
    frame = [encode_header(FrameType.RESULT, n_bytes), b"\x01" * n_bytes]

    def answer(connection: Connection) -> None:
        while connection.receive() is not None:
            connection.send(frame)

    listener = Listener(LOOPBACK, SocketConfig())
    acceptor = Acceptor(listener, answer, frames={}, limits=CallerLimits())
    acceptor.start()
    _say(acceptor.address.port)
    sys.stdin.read()
    acceptor.close()


def _say(answer: object) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    if kind == "stage":
        serve_stage(*map(int, numbers))
    else:
        send_frames(*map(int, numbers))
