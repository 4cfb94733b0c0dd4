"""Decode steps as recorded graphs: one launch for a step instead of one for each kernel.

Owns: a recording for each number of sessions, and the tensors that it reads and writes. Refuses to
know: sessions, what a step computes. Invariant: a recording reads everything that changes, the
caches' addresses among it, from tensors that are filled before each replay; so it stays valid for
any sessions of the pool whose caches it was recorded with.

A step that cannot be recorded is computed operation by operation, now and from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Protocol

import torch

from ds4py.kernels.cuda.decode_step import DecodesSteps, DecodeStep

log = logging.getLogger(__name__)

MAX_SESSIONS: Final = 32
"""Sessions in a recorded step; each number costs a recording, some hundredths of a second."""

_WARM_UPS: Final = 2  # before a recording: kernels are compiled, libraries take their memory


class GraphRecorder(Protocol):
    """A device's way to record."""

    def record(
        self, function: Callable[[], torch.Tensor]
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what a function queues on the device.

        Args:
            function: Called several times; reads only tensors that stay where they are.

        Returns:
            What queues the same again, and the tensor that the function's result is then in.

        Raises:
            RuntimeError: It cannot be recorded.
        """


class CudaRecorder:
    """Records CUDA graphs, which share their memory: one runs at a time.

    Args:
        device: The GPU, current on the calling thread.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, function: Callable[[], torch.Tensor]
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """See `GraphRecorder.record`."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile, a tokenizer's host copies for example
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded step with what it reads and writes."""

    step: DecodeStep
    replay: Callable[[], None]
    result: torch.Tensor


class GraphedDecode:
    """Runs a slice's decode steps from recordings.

    Args:
        model: The slice.
        recorder: Of its device.
    """

    def __init__(self, model: DecodesSteps, recorder: GraphRecorder):
        self._model = model
        self._recorder: GraphRecorder | None = recorder
        self._recordings: dict[int, _Recording] = {}

    def __call__(self, step: DecodeStep) -> torch.Tensor:
        """Return hidden states float32 `[B, W]` in memory of their own, and write the caches."""
        n_sessions = step.numbers.shape[1]
        recording = self._recordings.get(n_sessions)
        if recording is None:
            recording = self._record(step)
            if recording is None:
                return self._model.decode_step(step)
            self._recordings[n_sessions] = recording
        _fill(recording.step, step)
        recording.replay()
        return recording.result.clone()  # the next replay overwrites it, maybe during a download

    def _record(self, step: DecodeStep) -> _Recording | None:
        """Record steps of this size; None if that is not possible, or no use."""
        if self._recorder is None or step.numbers.shape[1] > MAX_SESSIONS:
            return None
        own = DecodeStep(step.numbers.clone(), None if step.hidden is None else step.hidden.clone())
        try:
            replay, result = self._recorder.record(lambda: self._model.decode_step(own))
        except RuntimeError as error:  # what fails here fails for every size: no further attempt
            log.warning("decode steps run without CUDA graphs: %s", error)
            self._recorder = None
            return None
        return _Recording(own, replay, result)


def _fill(target: DecodeStep, source: DecodeStep) -> None:
    target.numbers.copy_(source.numbers)
    if target.hidden is not None and source.hidden is not None:
        target.hidden.copy_(source.hidden)


def graphed(steps: DecodesSteps | None, device: torch.device) -> GraphedDecode | None:
    """Return how to run a slice's steps; None without a GPU, kernels' compiler, or such steps."""
    if steps is None or device.type != "cuda" or find_spec("triton") is None:
        return None
    return GraphedDecode(steps, CudaRecorder(device))
