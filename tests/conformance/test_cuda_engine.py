"""The engine on a GPU: copies beside computation, recorded decode steps, attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4py import activations
from ds4py.activations import HiddenBatch
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.engine.cuda_graphs import CudaRecorder, GraphedDecode
from ds4py.engine.host_staging import PinnedPool, StreamStaging
from ds4py.kernels.cache import CacheTensor, Segment
from ds4py.kernels.cuda.decode_step import DecodeStep, step_numbers
from ds4py.layer_range import LayerSpec
from ds4py.layers.attention import attend_many
from ds4py.layers.rope import Rope, RopeParams
from tests.support.toys import toy_llama

pytestmark = pytest.mark.cuda

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("toy") / "m.gguf", n_ctx=64)


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_states_travel_both_ways_in_page_locked_memory(bits: int) -> None:
    memory = PinnedPool(1 << 24)
    staging = StreamStaging(CUDA, memory)
    values = np.random.default_rng(0).standard_normal((300, 1000), np.float32)
    packed = HiddenBatch.pack(values, bits)
    there = staging.upload(packed)
    batch = staging.download(there, bits)()
    assert memory.used == batch.data.nbytes
    assert bytes(batch.data) == activations.pack(packed.unpack(), bits)
    del batch
    assert memory.used == 0


def test_a_download_is_what_the_tensor_was_when_it_was_asked_for() -> None:
    staging = StreamStaging(CUDA, PinnedPool(1 << 28))
    values = torch.ones(4096, 4096, device=CUDA)
    laters = []
    for _ in range(3):
        laters.append(staging.download(values, 16))
        values = values + 1
    assert [later().unpack().max() for later in laters] == [1, 2, 3]


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


def logits(answers: list[ForwardOutput | Exception]) -> np.ndarray:
    (answer,) = answers
    assert isinstance(answer, ForwardOutput), answer
    return answer.logits


def opened(path: Path, device: str, layers: str | None = None) -> LocalRunner:
    span = None if layers is None else LayerSpec.parse(layers)
    config = EngineConfig(model=path, precision="f32", threads=1, n_slots=2, device=device)
    return open_runner(config, span)


def test_batches_started_ahead_give_what_the_cpu_gives(model: Path) -> None:
    here, there = opened(model, "cpu"), opened(model, "cuda")
    works = spans((0, 20), (20, 21), (21, 40), (40, 41), (41, 42))
    begun = [there.forward_async([work]) for work in works]
    for work, started in zip(works, begun, strict=True):
        want = logits(here.run([work]))
        assert np.abs(logits(started.complete()) - want).max() < 1e-3 * np.ptp(want)


def test_starting_a_batch_does_not_wait_for_the_device(model: Path) -> None:
    runner = opened(model, "cuda", "0:2")
    first, second = spans((0, 20), (20, 40))
    logits_not_here = [
        ForwardRequest(**_fields(work), output_kind=OutputKind.HIDDEN) for work in (first, second)
    ]
    runner.run(logits_not_here[:1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = runner.forward_async(logits_not_here[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (answer,) = started.complete()
    assert isinstance(answer, ForwardOutput)


def _fields(work: ForwardRequest) -> dict[str, object]:
    names = ("session", "tokens", "pos0", "hidden")
    return {name: getattr(work, name) for name in names}


class OneLayer:
    """An embedding and one attention layer, made of the kernels of the decode step."""

    N_HEADS, N_GROUPS, D = 4, 2, 32

    def __init__(self, dtype: torch.dtype):
        torch.manual_seed(0)
        n_wide = (self.N_HEADS + 2 * self.N_GROUPS) * self.D
        self._embedding = torch.randn(50, 64, device=CUDA)
        self._qkv = torch.randn(64, n_wide, device=CUDA) / 8
        self._out = torch.randn(self.N_HEADS * self.D, 64, device=CUDA) / 8
        self._rotations = Rope(RopeParams(n_dims=self.D, base=1e4), 128, CUDA).at(0, 128)
        self.form = CacheTensor((2 * self.N_GROUPS, 128, self.D), dtype)

    def cache(self) -> list[torch.Tensor]:
        return [torch.full(self.form.shape, torch.nan, dtype=self.form.dtype, device=CUDA)]

    def decode_step(self, step: DecodeStep) -> torch.Tensor:
        from ds4py.kernels.cuda.decode_attention import attend_sessions
        from ds4py.kernels.cuda.rope_store import rotate_and_store

        x = self._embedding[step.tokens] if step.hidden is None else step.hidden
        qkv = x @ self._qkv
        place = step.addresses[0], step.positions
        rotate_and_store(qkv, self._rotations, *place, self.form)
        q = qkv[:, : self.N_HEADS * self.D].view(-1, self.N_GROUPS, 2, self.D)
        return x + attend_sessions(q, *place, self.form).float() @ self._out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_equal_computed_ones_for_any_sessions(dtype: torch.dtype) -> None:
    model = OneLayer(dtype)
    run = GraphedDecode(model, CudaRecorder(CUDA))
    caches = {True: [model.cache() for _ in range(3)], False: [model.cache() for _ in range(3)]}
    position = [0, 0, 0]
    for sessions in ([0], [1], [0, 1], [2, 0], [0, 1, 2], [2], [1, 2]) * 3:
        results = []
        for replayed in (True, False):
            segments = [Segment(caches[replayed][one], position[one], 1) for one in sessions]
            numbers = step_numbers([7 + one for one in sessions], segments)
            step = DecodeStep(torch.tensor(numbers, device=CUDA), None)
            results.append(run(step) if replayed else model.decode_step(step))
        assert torch.allclose(*results, atol=1e-5 if dtype is torch.float32 else 2e-2)
        assert results[0].isfinite().all()
        for one in sessions:
            position[one] += 1


@pytest.mark.parametrize("pos0", [0, 100])
def test_a_chunk_in_bfloat16_goes_to_the_flash_kernel(pos0: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from ds4py.kernels.cuda.chunk_attention import attend_chunk

    kv = torch.randn(4, 400, 64, device=CUDA).bfloat16()
    q = torch.randn(200, 2, 4, 64, device=CUDA)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # or it fails
        got = attend_chunk(q, kv, pos0)
    want = attend_many(q.cpu(), kv.cpu(), pos0)
    assert (got.cpu() - want).abs().max() < 2e-2
