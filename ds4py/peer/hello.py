"""What each side of a connection says about itself.

Owns: the HELLO of the stock protocol and the extension HELLO of both roles, the build id. Refuses
to know: connections, what the other side makes of it. Invariant: both hellos of one process tell
the same.
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

from ds4py import __version__
from ds4py.config import CoordinatorConfig, WorkerConfig
from ds4py.contracts import ModelCard, ModelRunner
from ds4py.layer_range import LayerRange
from ds4py.wire.extensions import CANCEL, DROP, FORK, HOP_LOST, REWIND, PeerHello
from ds4py.wire.messages import Hello


@functools.cache
def build_id() -> str:
    """Return a name for the very code that runs: a checksum over the package's sources.

    Two machines with the same version and different code are a common cause of odd failures.
    """
    root = Path(__file__).parents[1]
    checksum = 0
    for path in sorted(root.rglob("*.py")):
        checksum = zlib.crc32(path.relative_to(root).as_posix().encode(), checksum)
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{checksum:08x}"


def plain_hello(runner: ModelRunner, listen_port: int) -> Hello:
    """Return the HELLO of the stock protocol (docs/spec/wire-protocol.md#hello)."""
    card, layers = runner.card, runner.layers
    return Hello(
        model_id=card.model_id,
        quant_bits=card.quant_bits,
        layer_start=layers.start,
        layer_end=layers.end,
        has_output=int(layers.has_output),
        has_hidden=1,
        ctx_size=runner.n_ctx,
        n_layers=card.n_layers,
        listen_port=listen_port,
        model_name=card.name.encode(),
    )


def worker_hello(runner: ModelRunner, listen_port: int, config: WorkerConfig) -> PeerHello:
    """Return a worker's half of the extension handshake."""
    card, layers = runner.card, runner.layers
    return PeerHello(
        role="worker",
        version=__version__,
        build=build_id(),
        features=(CANCEL, DROP, HOP_LOST, *((REWIND, FORK) if runner.can_rewind else ())),
        model_id=card.model_id,
        model_name=card.name,
        n_layers=card.n_layers,
        quant_bits=card.quant_bits,
        ctx_size=runner.n_ctx,
        layer_start=layers.start,
        layer_end=layers.end,
        has_output=layers.has_output,
        has_hidden=True,
        listen_port=listen_port,
        weight_bytes=runner.weight_bytes,
        alive_timeout=config.alive_timeout or None,
        fingerprint=card.fingerprint,
    )


def coordinator_hello(
    card: ModelCard, n_ctx: int, own: LayerRange | None, config: CoordinatorConfig
) -> PeerHello:
    """Return a coordinator's half of the extension handshake; `own` are its own layers, if any."""
    return PeerHello(
        role="coordinator",
        version=__version__,
        build=build_id(),
        model_id=card.model_id,
        model_name=card.name,
        n_layers=card.n_layers,
        quant_bits=card.quant_bits,
        ctx_size=n_ctx,
        layer_start=None if own is None else own.start,
        layer_end=None if own is None else own.end,
        alive_timeout=config.alive_timeout or None,
        fingerprint=card.fingerprint,
    )
