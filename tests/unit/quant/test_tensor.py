"""QuantTensor: sizes, ownership, whole decoding and row lookup."""

import numpy as np
import pytest
import torch

from ds4py.errors import ModelError, UnsupportedQuantError
from ds4py.quant import tensor as tensor_module
from ds4py.quant.formats import FORMATS, QuantFormat
from ds4py.quant.tensor import QuantTensor
from tests.support.quant_blocks import finite_blocks

torch.set_num_threads(1)

BY_NAME = {kind.name: kind for kind in FORMATS.values()}

every_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)


def make(kind: QuantFormat, shape: tuple[int, ...], seed: int = 0) -> QuantTensor:
    """Random weights; the last axis of `shape` counts blocks."""
    blocks = finite_blocks(kind, seed, int(np.prod(shape)))
    full = (*shape[:-1], shape[-1] * kind.block_values)
    return QuantTensor.from_bytes("w", kind.type_id, full, memoryview(blocks.tobytes()), "cpu")


@every_format
def test_decode_gives_the_blocks_in_the_logical_shape(kind: QuantFormat) -> None:
    weights = make(kind, (3, 2))
    values = weights.decode()
    assert values.shape == (3, 2 * kind.block_values)
    assert values.dtype == torch.float32
    expected = kind.decode(torch.from_numpy(finite_blocks(kind, 0, 6)))
    assert torch.equal(values.view(expected.shape), expected)


@every_format
def test_decode_to_bf16_rounds_the_float32_values(kind: QuantFormat) -> None:
    weights = make(kind, (2, 2))
    narrow = weights.decode(torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, weights.decode().to(torch.bfloat16))


@every_format
def test_rows_equal_the_rows_of_the_whole(kind: QuantFormat) -> None:
    weights = make(kind, (5, 3))
    index = torch.tensor([4, 0, 0, 3])
    assert torch.equal(weights.rows(index), weights.decode()[index])
    half = weights.rows(index.to(torch.int32), torch.bfloat16)
    assert torch.equal(half, weights.decode(torch.bfloat16)[index])


def test_no_rows_are_an_empty_matrix() -> None:
    weights = make(BY_NAME["Q4_K"], (5, 3))
    assert weights.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 768)


@every_format
def test_chunks_do_not_show(kind: QuantFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make(kind, (5, 3))
    whole = weights.decode()
    monkeypatch.setattr(tensor_module, "_CPU_CHUNK_VALUES", 2 * 256)
    assert torch.equal(weights.decode(), whole)


def test_a_vector_is_one_row() -> None:
    weights = make(BY_NAME["F32"], (7,))
    assert weights.raw.shape == (1, 28)
    assert weights.decode().shape == (7,)


@pytest.mark.parametrize(
    ("name", "dtype"), [("I32", torch.int32), ("I32", torch.int64), ("I64", torch.int64)]
)
def test_large_integers_stay_exact(name: str, dtype: torch.dtype) -> None:
    kind = BY_NAME[name]
    numbers = np.array([[2**24 + 1, -(2**31), 2**31 - 1]], f"<i{kind.block_bytes}")
    data = memoryview(numbers.tobytes())
    weights = QuantTensor.from_bytes("ids", kind.type_id, (1, 3), data, "cpu")
    assert weights.decode(dtype).tolist() == numbers.tolist()
    assert weights.rows(torch.tensor([0]), dtype).tolist() == numbers.tolist()


@every_format
def test_decoded_values_do_not_share_the_packed_memory(kind: QuantFormat) -> None:
    weights = make(kind, (1, 1))
    before = weights.raw.clone()
    weights.decode().zero_()
    weights.decode(weights.decode().dtype).zero_()
    assert torch.equal(weights.raw, before)


def test_the_bytes_are_copied() -> None:
    source = bytearray(18)
    weights = QuantTensor.from_bytes("w", 2, (1, 32), memoryview(source), "cpu")
    source[:] = b"\xff" * 18
    assert not weights.raw.any()
    source.clear()  # a buffer that is still lent out would refuse this


def test_size_and_device_are_told() -> None:
    weights = make(BY_NAME["Q6_K"], (3, 2))
    assert weights.n_bytes == 3 * 2 * 210
    assert weights.raw.shape == (3, 420)
    assert weights.device == torch.device("cpu")


@pytest.mark.parametrize("size", [0, 35, 37, 72])
def test_a_wrong_number_of_bytes_is_refused(size: int) -> None:
    with pytest.raises(ModelError, match=rf"blk\.0\.w: got {size} bytes, expected 36 bytes") as hit:
        QuantTensor.from_bytes("blk.0.w", 2, (2, 32), memoryview(bytes(size)), "cpu")
    assert hit.value.tensor == "blk.0.w"


@pytest.mark.parametrize("shape", [(), (0, 32), (2, 0), (2, 33), (2, 16), (-1, 32), (-2, -32)])
def test_a_shape_that_blocks_can_not_fill_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="w: got shape"):
        QuantTensor.from_bytes("w", 2, shape, memoryview(bytes(36)), "cpu")


def test_a_gigantic_shape_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ModelError, match="w: got 36 bytes"):
        QuantTensor.from_bytes("w", 2, (2**40, 2**40), memoryview(bytes(36)), "cpu")


def test_a_type_without_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedQuantError, match="'w': got type 15"):
        QuantTensor.from_bytes("w", 15, (1, 256), memoryview(bytes(292)), "cpu")


@pytest.mark.cuda
@every_format
def test_a_tensor_on_cuda_decodes_as_on_the_cpu(
    kind: QuantFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_module, "_UPLOAD_BYTES", 100)  # several uploads
    monkeypatch.setattr(tensor_module, "_DEVICE_CHUNK_VALUES", 512)
    here = make(kind, (5, 3))
    data = memoryview(here.raw.numpy().tobytes())
    there = QuantTensor.from_bytes("w", kind.type_id, here.shape, data, "cuda")
    assert there.device.type == "cuda"
    assert torch.equal(there.decode().cpu(), here.decode())
    index = torch.tensor([4, 1])
    assert torch.equal(there.rows(index.cuda()).cpu(), here.rows(index))
