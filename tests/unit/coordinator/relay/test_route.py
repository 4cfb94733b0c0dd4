"""Flags of the frames to hop 0, as docs/spec/wire-protocol.md#prefill has them."""

from __future__ import annotations

import pytest

from ds4py.coordinator.chunked_prefill import cut_chunks
from ds4py.coordinator.relay.route import RouteShape, work_flags
from ds4py.wire.prefix_hash import prefix_hash

OUTPUT_WORKER = RouteShape(first_layer=2, first_is_output=True)
MIDDLE_WORKER = RouteShape(first_layer=2, first_is_output=False)
FIRST_WORKER = RouteShape(first_layer=0, first_is_output=False)


def flags(n: int, chunk: int, shape: RouteShape, *, start: int = 0, ack: bool = True) -> list[int]:
    tokens = list(range(n))
    chunks = cut_chunks(tokens, start, prefix_hash(tokens[:start]), chunk=chunk)
    return [int(work_flags(shape, part, ack_early=ack)) for part in chunks]


@pytest.mark.parametrize(
    ("n", "chunk", "shape", "options", "expected"),
    [
        (7, 2, OUTPUT_WORKER, {}, [0xF, 0xB, 0xB, 0x3]),  # wire-protocol.md#pipelined-prefill
        (7, 2, MIDDLE_WORKER, {}, [0xD, 0x9, 0x9, 0x1]),
        (7, 2, FIRST_WORKER, {}, [0xC, 0x8, 0x8, 0x0]),
        (7, 2, OUTPUT_WORKER, {"start": 2}, [0xB, 0xB, 0x3]),  # a suffix resets nothing
        (7, 2, OUTPUT_WORKER, {"ack": False}, [0x7, 0x3, 0x3, 0x3]),  # without a pipeline
        (7, 7, OUTPUT_WORKER, {}, [0x7]),  # one span: its answer is wanted
        (7, 100, OUTPUT_WORKER, {}, [0x7]),
        (8, 7, OUTPUT_WORKER, {"start": 7}, [0x3]),  # a decode
    ],
)
def test_flags_follow_the_table(n, chunk, shape, options, expected) -> None:
    assert flags(n, chunk, shape, **options) == expected
