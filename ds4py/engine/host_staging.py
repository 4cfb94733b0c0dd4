"""Activations and logits between host and device, beside what the device computes.

Owns: page-locked memory, the copy streams, when a result has arrived. Refuses to know: codecs
(`activation_codec`), sessions, who asks. Invariant: a result's memory is not used again while
anybody can still see it, and nobody sees it before it is complete.

On the CPU there is nothing to wait for. On a GPU a copy from ordinary memory waits for all work
before it, and the host with it; so what goes up is first copied into page-locked memory, and both
directions have a stream of their own. The activation of one chunk then leaves while the next one,
already queued, is computed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ds4py.activations import F32, HiddenBatch
from ds4py.engine.activation_codec import download, pack, unpack, upload

T = TypeVar("T")
Later = Callable[[], T]
"""Waits until a value is complete, and returns it."""

Bytes = npt.NDArray[np.uint8]

PINNED_BYTES: Final = 1 << 30
"""Page-locked memory in use at a time: some sixteen chunks of 1024 tokens of DeepSeek V4 Flash."""

_DTYPES: Final = {32: torch.float32, 16: torch.float16, 8: torch.uint8}


def page_locked(n_bytes: int) -> torch.Tensor:
    """Return uint8 `[n_bytes]` of memory that a GPU reads and writes by itself."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedPool:
    """Memory for copies to and from a device: page-locked up to a limit, ordinary beyond it.

    Torch keeps page-locked memory that was freed, and hands it out again when no copy uses it any
    more. What is counted here is what was handed out and can still be seen.

    Args:
        limit: Bytes of page-locked memory.
        allocate: Where that comes from.
    """

    def __init__(self, limit: int, allocate: Callable[[int], torch.Tensor] = page_locked):
        self._limit = limit
        self._allocate = allocate
        self._used = 0
        self._lock = threading.RLock()  # memory is given back wherever its last user lets it go

    @property
    def used(self) -> int:
        """Page-locked bytes that somebody can still see."""
        return self._used

    def take(self, n_bytes: int) -> tuple[torch.Tensor, Bytes]:
        """Return uint8 `[n_bytes]` as a tensor, for torch to copy, and as an array.

        The memory counts as given back when the array and all views of it are gone.
        """
        if not self._reserve(n_bytes):
            tensor = torch.empty(n_bytes, dtype=torch.uint8)
            return tensor, tensor.numpy()
        try:
            tensor = self._allocate(n_bytes)
        except BaseException:
            self._give_back(n_bytes)
            raise
        array = tensor.numpy()
        weakref.finalize(array, self._give_back, n_bytes).atexit = False
        return tensor, array

    def _reserve(self, n_bytes: int) -> bool:
        with self._lock:
            if not n_bytes or self._used + n_bytes > self._limit:
                return False
            self._used += n_bytes
            return True

    def _give_back(self, n_bytes: int) -> None:
        with self._lock:
            self._used -= n_bytes


class Staging(Protocol):
    """How tensors come to a device and leave it; used on the thread that owns the device."""

    @property
    def overlaps(self) -> bool:
        """Whether results are complete later than they are asked for."""

    def integers(self, numbers: object) -> torch.Tensor:
        """Return int64 of a nested list, on the device."""

    def upload(self, batch: HiddenBatch) -> torch.Tensor:
        """Return float32 `[T, W]` on the device, in memory of its own; the batch may go."""

    def download(self, hidden: torch.Tensor, bits: int) -> Later[HiddenBatch]:
        """Pack float32 `[T, W]` at 32, 16 or 8 bits into host memory.

        The tensor may be overwritten by what is queued on the device afterwards, unless `bits` is
        32 and the device is the CPU: then the batch's bytes are the tensor's.
        """

    def fetch(self, values: torch.Tensor) -> Later[F32]:
        """Return a float32 tensor as an array of the receiver's own."""


def staging_for(device: torch.device) -> Staging:
    """Return what suits a device."""
    if device.type == "cpu":
        return DirectStaging(device)
    return StreamStaging(device, PinnedPool(PINNED_BYTES))


class DirectStaging:
    """Everything is complete at once."""

    overlaps = False

    def __init__(self, device: torch.device):
        self._device = device

    def integers(self, numbers: object) -> torch.Tensor:
        """See `Staging.integers`."""
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def upload(self, batch: HiddenBatch) -> torch.Tensor:
        """See `Staging.upload`."""
        return upload(batch, self._device)

    def download(self, hidden: torch.Tensor, bits: int) -> Later[HiddenBatch]:
        """See `Staging.download`."""
        batch = download(hidden, bits)
        return lambda: batch

    def fetch(self, values: torch.Tensor) -> Later[F32]:
        """See `Staging.fetch`."""
        array: F32 = values.cpu().numpy().astype(np.float32, copy=False)
        return lambda: array


class StreamStaging:
    """Copies on streams of their own, results behind events.

    Args:
        device: A GPU; tests use the CPU, whose streams do everything at once.
        memory: Home of both directions' bytes on the host.
    """

    overlaps = True

    def __init__(self, device: torch.device, memory: PinnedPool):
        self._device = device
        self._memory = memory
        self._module: Any = torch.get_device_module(device)
        with active(device):
            self._up, self._down = self._module.Stream(), self._module.Stream()

    def integers(self, numbers: object) -> torch.Tensor:
        """See `Staging.integers`; few numbers only: the driver takes its own copy of them."""
        return torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True)

    def upload(self, batch: HiddenBatch) -> torch.Tensor:
        """See `Staging.upload`; waits for nothing but a copy from host to host."""
        staged, array = self._memory.take(batch.data.nbytes)
        array[:] = np.frombuffer(batch.data, np.uint8)
        with self._module.stream(self._up):
            raw = torch.empty_like(staged, device=self._device).copy_(staged, non_blocking=True)
        compute = self._module.current_stream(self._device)
        compute.wait_stream(self._up)
        _outlives(raw, compute)
        return unpack(raw.view(_DTYPES[batch.bits]).view(batch.rows, batch.width), batch.bits)

    def download(self, hidden: torch.Tensor, bits: int) -> Later[HiddenBatch]:
        """See `Staging.download`."""
        rows, width = hidden.shape
        arrive = self._bring(pack(hidden, bits))
        return lambda: HiddenBatch(rows, width, bits, arrive().data)

    def fetch(self, values: torch.Tensor) -> Later[F32]:
        """See `Staging.fetch`; copied again, as who keeps it should not keep page-locked memory."""
        arrive = self._bring(values.float().contiguous())
        return lambda: arrive().view(np.float32).reshape(values.shape).copy()

    def _bring(self, values: torch.Tensor) -> Later[Bytes]:
        """Copy a contiguous tensor's bytes to the host, behind what computes it."""
        raw = values.view(-1).view(torch.uint8)
        host, array = self._memory.take(raw.numel())
        self._down.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._down):
            host.copy_(raw, non_blocking=True)
        _outlives(raw, self._down)
        done = self._module.Event()
        done.record(self._down)

        def arrive() -> Bytes:
            done.synchronize()
            return array

        return arrive


def active(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, where kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _outlives(tensor: torch.Tensor, stream: Any) -> None:
    """Keep a tensor's memory from being used again before a stream is done with it."""
    if tensor.is_cuda:
        tensor.record_stream(stream)
