"""Recorded steps: when they are recorded, what they read, and what happens when they cannot be."""

import logging

import numpy as np
import pytest
import torch

from ds4py.activations import HiddenBatch
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import open_runner
from ds4py.engine.cuda_graphs import MAX_SESSIONS, GraphedDecode, graphed
from ds4py.kernels.cache import Segment
from ds4py.kernels.cuda.decode_step import DecodeStep
from ds4py.layer_range import LayerSpec
from tests.support.toys import toy_llama


class Recorder:
    """Keeps a graph's contract on the CPU: the same tensors in, the same tensor out."""

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.recorded = self.replayed = 0

    def record(self, function):
        self.recorded += 1
        if self.error is not None:
            raise self.error
        result = function()

        def replay():
            self.replayed += 1
            result.copy_(function())

        return replay, result


class Adding:
    """A slice whose result shows everything that a step reads."""

    def __init__(self):
        self.eager = 0

    def decode_step(self, step):
        self.eager += 1
        base = torch.zeros(step.tokens.shape[0], 2) if step.hidden is None else step.hidden
        return base + (step.tokens + 100 * step.positions + 10000 * step.addresses.sum(0))[:, None]


def step(*columns, hidden=None) -> DecodeStep:
    return DecodeStep(torch.tensor(columns).T.contiguous(), hidden)


def test_a_step_is_recorded_once_for_each_number_of_sessions():
    recorder = Recorder()
    run = GraphedDecode(Adding(), recorder)
    one, two = step((1, 2, 3)), step((1, 2, 3), (4, 5, 6))
    for case in (one, two, one, two, one):
        run(case)
    assert (recorder.recorded, recorder.replayed) == (2, 5)


def test_a_replay_reads_the_tokens_positions_caches_and_states_of_its_own_step():
    run = GraphedDecode(Adding(), Recorder())
    first = run(step((1, 2, 3), (4, 5, 6), hidden=torch.ones(2, 2)))
    second = run(step((7, 0, 1), (0, 1, 0), hidden=torch.full((2, 2), 0.5)))
    assert second[:, 0].tolist() == [10007.5, 100.5]
    assert first[:, 0].tolist() == [30202, 60505], "a result outlives the next replay"


def test_the_callers_tensors_are_left_alone():
    states = torch.ones(1, 2)
    own = step((1, 2, 3), hidden=states)
    run = GraphedDecode(Adding(), Recorder())
    run(own)
    run(step((9, 9, 9), hidden=torch.zeros(1, 2)))
    assert own.numbers.flatten().tolist() == [1, 2, 3]
    assert states.tolist() == [[1, 1]]


def test_what_can_not_be_recorded_runs_without_and_is_told_once(caplog):
    recorder = Recorder(RuntimeError("operation not permitted when stream is capturing"))
    run = GraphedDecode(Adding(), recorder)
    with caplog.at_level(logging.WARNING):
        for n in (1, 2, 1):
            assert run(step(*[(1, 2, 0)] * n)).tolist() == [[201, 201]] * n
    assert recorder.recorded == 1
    (record,) = caplog.records
    assert "without CUDA graphs: operation not permitted" in record.message


def test_more_sessions_than_are_recorded_run_without():
    recorder, model = Recorder(), Adding()
    run = GraphedDecode(model, recorder)
    many = step(*[(1, 2, 0)] * (MAX_SESSIONS + 1))
    run(many)
    run(many)
    assert (recorder.recorded, model.eager) == (0, 2)
    run(step(*[(1, 2, 0)] * MAX_SESSIONS))
    assert recorder.recorded == 1


def test_other_errors_are_not_hidden():
    run = GraphedDecode(Adding(), Recorder(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        run(step((1, 2, 3)))


@pytest.mark.parametrize("model", [None, Adding()])
def test_a_cpu_records_nothing(model):
    assert graphed(model, torch.device("cpu")) is None


# --- the runner


class Stepping:
    """A llama whose steps find their caches by address, as kernels do."""

    def __init__(self, runner):
        self._inner = runner._model
        pool = runner._caches.pool
        self._tensors = {
            part.data_ptr(): part for slot in range(pool.n_slots) for part in pool.cache(slot)
        }

    def decode_step(self, step):
        states = self._inner.embed(step.tokens) if step.hidden is None else step.hidden.clone()
        segments = [
            Segment([self._tensors[address] for address in session], position, 1)
            for session, position in zip(
                step.addresses.T.tolist(), step.positions.tolist(), strict=True
            )
        ]
        return self._inner.forward(states, step.tokens, segments)


def work(session, tokens, pos0, hidden=None) -> ForwardRequest:
    return ForwardRequest(
        session=SessionId(session),
        tokens=tokens,
        pos0=pos0,
        hidden=hidden,
        output_kind=OutputKind.HIDDEN,
    )


@pytest.mark.parametrize("layers", ["0:2", "2:output"])
def test_the_runner_hands_single_tokens_to_the_recording(tmp_path, layers):
    path = toy_llama(tmp_path / "m.gguf", n_ctx=32)
    config = EngineConfig(model=path, precision="f32", threads=1, n_slots=2)
    plain, recorded = (open_runner(config, LayerSpec.parse(layers)) for _ in range(2))
    recorder = Recorder()
    recorded._graphed = GraphedDecode(Stepping(recorded), recorder)
    first = layers.startswith("0")
    rng = np.random.default_rng(0)

    def states(n):
        if first:
            return None
        return HiddenBatch.pack(rng.standard_normal((n, 64), np.float32), 32)

    prompts = [work(1, (5, 6, 7), 0, states(3)), work(2, (8, 9), 0, states(2))]
    singles = [
        [work(1, (10,), 3, states(1)), work(2, (11,), 2, states(1))],
        [work(2, (12,), 3, states(1)), work(1, (13,), 4, states(1))],
        [work(1, (14,), 5, states(1))],
    ]
    for batch in (prompts, *singles):
        for got, want in zip(recorded.run(batch), plain.run(batch), strict=True):
            assert bytes(got.hidden.data) == bytes(want.hidden.data)
    assert (recorder.recorded, recorder.replayed) == (2, 3)
    recorded.close()
    assert recorded._graphed is None
