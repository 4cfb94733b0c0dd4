"""Stages that cost nothing: tokens really walk over them, frames really arrive."""

from __future__ import annotations

import numpy as np
import pytest

from ds4py.activations import HiddenBatch
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.errors import SnapshotError
from ds4py.layer_range import LayerRange
from tools.benchmarks.hop import frame_rates, hop_medians, null_session
from tools.benchmarks.null_runner import WIDTH, NullRunner

ONE = SessionId(1)


def work(want: OutputKind, hidden: HiddenBatch | None = None) -> ForwardRequest:
    return ForwardRequest(session=ONE, tokens=(5,), pos0=3, hidden=hidden, output_kind=want)


def test_a_stub_hands_back_what_it_got_or_the_same_logits() -> None:
    stub = NullRunner(LayerRange(1, 1, has_output=True), 2)
    hidden = HiddenBatch.pack(np.full((1, WIDTH), 2, np.float32), 32)
    got, made, logits, nothing = (
        stub.run([work(*wanted)])[0]
        for wanted in (
            (OutputKind.HIDDEN, hidden),
            (OutputKind.HIDDEN,),
            (OutputKind.LOGITS,),
            (OutputKind.NOTHING,),
        )
    )
    assert isinstance(got, ForwardOutput)
    assert got.hidden is hidden
    assert isinstance(made, ForwardOutput)
    assert made.hidden is not None
    assert made.hidden.data.nbytes == 64 << 10
    assert isinstance(logits, ForwardOutput)
    assert logits.logits is not None
    assert nothing == ForwardOutput()


def test_a_stub_knows_lengths_and_has_no_cache() -> None:
    stub = NullRunner(LayerRange(0, 0, has_output=False), 2)
    stub.run([work(OutputKind.HIDDEN)])
    assert stub.length(ONE) == 4
    stub.rewind(ONE, 2)
    assert stub.length(ONE) == 2
    with pytest.raises(SnapshotError):
        stub.save_cache(ONE)
    with pytest.raises(SnapshotError):
        stub.load_cache(ONE, 2, memoryview(b""))
    stub.drop(ONE)
    assert stub.length(ONE) is None


def test_a_token_walks_over_every_stub() -> None:
    with null_session(2) as session:
        session.sync([1])
        assert session.eval(2).shape == (256,)
        assert list(session.tokens) == [1, 2]


def test_every_route_is_timed_each_round() -> None:
    told: list[str] = []
    usec = hop_medians(2, 3, told.append)
    assert {n: len(rounds) for n, rounds in usec.items()} == {0: 2, 1: 2, 2: 2}
    assert all(value > 0 for rounds in usec.values() for value in rounds)
    assert told[:3] == [f"a token over {n} hops" for n in (0, 1, 2)]


def test_frames_are_read_in_both_ways() -> None:
    ours, bare = frame_rates(3, 1 << 16)
    assert len(ours) == len(bare) == 3
    assert min(*ours, *bare) > 0
