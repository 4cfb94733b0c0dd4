"""Copies behind events: the same bits as direct ones, memory that lives as long as it is seen."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ds4py import activations
from ds4py.activations import HiddenBatch
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import open_runner
from ds4py.engine.host_staging import DirectStaging, PinnedPool, StreamStaging, staging_for
from ds4py.engine.outputs import answers
from ds4py.errors import ModelError
from tests.support.toys import toy_llama

CPU = torch.device("cpu")
WIDTHS = (32, 16, 8)


def memory(limit: int = 1 << 20) -> PinnedPool:
    return PinnedPool(limit, lambda n: torch.empty(n, dtype=torch.uint8))


@pytest.fixture
def values():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=["direct", "streams"])
def staging(request):
    return DirectStaging(CPU) if request.param == "direct" else StreamStaging(CPU, memory())


def test_a_cpu_needs_no_streams():
    assert isinstance(staging_for(CPU), DirectStaging)


@pytest.mark.parametrize("bits", WIDTHS)
def test_states_travel_down_and_up_as_the_reference_packs_them(staging, values, bits):
    batch = staging.download(values, bits)()
    assert (batch.rows, batch.width, batch.bits) == (3, 8, bits)
    assert bytes(batch.data) == activations.pack(values.numpy(), bits)
    assert np.array_equal(staging.upload(batch).numpy(), batch.unpack())


@pytest.mark.parametrize("bits", WIDTHS)
def test_uploaded_states_are_memory_of_their_own(staging, values, bits):
    data = bytearray(activations.pack(values.numpy(), bits))
    uploaded = staging.upload(HiddenBatch(3, 8, bits, memoryview(data)))
    before = uploaded.clone()
    data[:] = bytes(len(data))
    assert torch.equal(uploaded, before)
    uploaded += 1
    assert not any(data)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_streams_result_does_not_change_with_the_tensor(values, bits):
    later = StreamStaging(CPU, memory()).download(values, bits)
    expected = activations.pack(values.numpy(), bits)
    values.zero_()
    assert bytes(later().data) == expected


def test_fetched_values_are_the_receivers_own(staging, values):
    array = staging.fetch(values.clone())()
    assert array.dtype == np.float32
    assert np.array_equal(array, values.numpy())
    array += 1


def test_integers_keep_their_nesting(staging):
    numbers = staging.integers([[1, 2], [3, 1 << 40]])
    assert numbers.dtype is torch.int64
    assert numbers.tolist() == [[1, 2], [3, 1 << 40]]


def test_memory_is_given_back_when_nobody_sees_it_any_more(values):
    own = memory()
    staging = StreamStaging(CPU, own)
    batch = staging.download(values, 16)()
    assert own.used == 48
    part = batch.data[16:32]
    expected = bytes(part)
    del batch
    gc.collect()
    assert own.used == 48
    assert bytes(part) == expected
    del part
    assert own.used == 0


def test_memory_of_an_upload_and_of_logits_is_free_at_once(values):
    own = memory()
    staging = StreamStaging(CPU, own)
    staging.upload(DirectStaging(CPU).download(values, 32)())
    kept = staging.fetch(values)()
    assert own.used == 0
    assert kept.shape == (3, 8)


def test_beyond_the_limit_memory_is_ordinary():
    asked = []
    own = PinnedPool(100, lambda n: asked.append(n) or torch.empty(n, dtype=torch.uint8))
    first, second, third = own.take(60), own.take(60), own.take(40)
    assert asked == [60, 40]
    assert own.used == 100
    assert [array.size for _, array in (first, second, third)] == [60, 60, 40]
    del first
    assert own.used == 40


def test_memory_that_was_not_to_be_had_does_not_count():
    def fail(n_bytes):
        raise RuntimeError("no memory")

    own = PinnedPool(100, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        own.take(60)
    assert own.used == 0


# --- answers


def work(n: int, want: OutputKind, bits: int = 32) -> ForwardRequest:
    return ForwardRequest(
        session=SessionId(1),
        tokens=(0,) * n,
        pos0=0,
        hidden=None,
        output_kind=want,
        reply_bits=bits,
    )


def test_every_span_gets_its_own_rows_in_its_own_form(staging):
    works = [
        work(1, OutputKind.HIDDEN, 8),
        work(3, OutputKind.LOGITS),
        work(2, OutputKind.HIDDEN, 16),
        work(1, OutputKind.NOTHING),
        work(1, OutputKind.HIDDEN, 8),
        work(1, OutputKind.LOGITS),
    ]
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    calls = []

    def logits(last: torch.Tensor) -> torch.Tensor:
        calls.append(last.shape[0])
        return torch.cat((last, last), 1)

    found = answers(works, rows, logits, staging)()
    assert calls == [2], "one product for all"
    for place, own, bits in ((0, slice(0, 1), 8), (2, slice(4, 6), 16), (4, slice(7, 8), 8)):
        batch = found[place].hidden
        assert (batch.rows, batch.width, batch.bits) == (own.stop - own.start, 4, bits)
        assert bytes(batch.data) == activations.pack(rows[own].numpy(), bits)
    for place, row in ((1, 3), (5, 8)):
        assert np.array_equal(found[place].logits, rows[row].repeat(2).numpy())
    assert found[3] == ForwardOutput()


# --- the runner


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy_llama(tmp_path_factory.mktemp("toy") / "m.gguf", n_ctx=32)


def opened(model, *, streams: bool):
    runner = open_runner(EngineConfig(model=model, precision="f32", threads=1, n_slots=2))
    if streams:  # as on a GPU, where `open_runner` takes them by itself
        runner._staging = StreamStaging(CPU, memory())
    return runner


def spans(*ranges: tuple[int, int]) -> list[ForwardRequest]:
    return [
        ForwardRequest(
            session=SessionId(1),
            tokens=tuple(range(start, end)),
            pos0=start,
            hidden=None,
            output_kind=OutputKind.LOGITS,
        )
        for start, end in ranges
    ]


def test_batches_that_are_started_ahead_give_the_bits_of_single_ones(model):
    ahead, plain = opened(model, streams=True), opened(model, streams=False)
    works = spans((0, 4), (4, 9), (9, 10))
    begun = [ahead.forward_async([work]) for work in works]
    assert (ahead.overlaps, plain.overlaps) == (True, False)
    assert ahead.length(SessionId(1)) == 10
    for work, started in zip(works, begun, strict=True):
        ((got,), (want,)) = started.complete(), plain.run([work])
        assert np.array_equal(got.logits, want.logits)
        assert got.eval_usec >= 0


def test_times_of_batches_started_ahead_add_up_to_no_more_than_the_whole(model, monkeypatch):
    clock = iter(range(0, 10**9, 1_000_000))
    monkeypatch.setattr("ds4py.engine.runner.time.perf_counter_ns", lambda: next(clock))
    runner = opened(model, streams=True)
    begun = [runner.forward_async([work]) for work in spans((0, 4), (4, 9))]
    times = [started.complete()[0].eval_usec for started in begun]
    assert times == [2000, 1000]


def test_a_refusal_beside_a_batch_started_ahead_says_so_in_its_place(model):
    runner = opened(model, streams=True)
    bad, good = spans((3, 4), (0, 2))
    started = runner.forward_async([bad, good])
    refused, answered = started.complete()
    assert isinstance(refused, ModelError)
    assert started.refused == {0: refused}
    assert answered.logits is not None


def test_a_batch_is_ready_and_complete_when_it_was_computed_whatever_is_wanted(model, monkeypatch):
    calls: list[str] = []

    class Moment:
        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            return "synchronize" in calls

        def synchronize(self) -> None:
            calls.append("synchronize")

    runner = opened(model, streams=True)
    (work,) = spans((0, 4))
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Moment))
    started = runner.forward_async([replace(work, output_kind=OutputKind.NOTHING)])
    assert (calls, started.ready()) == (["record"], False)
    assert started.complete()[0].logits is None
    assert (calls, started.ready()) == (["record", "synchronize"], True)
