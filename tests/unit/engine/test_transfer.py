"""The device codec equals the reference codec bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ds4py import hidden
from ds4py.engine.transfer import download, upload
from ds4py.hidden import HiddenBatch
from tests.golden import load_npz

CPU = torch.device("cpu")
WIDTHS = (32, 16, 8)


def assert_packs_alike(bits_of_values: np.ndarray) -> None:
    values = bits_of_values.view(np.float32).reshape(1, -1)
    for bits in WIDTHS:
        got = bytes(download(torch.from_numpy(values.copy()), bits).data)
        assert got == hidden.pack(values, bits), f"{bits} bits"


def assert_unpacks_alike(codes: np.ndarray, bits: int) -> None:
    data = memoryview(codes.tobytes())
    got = upload(HiddenBatch(1, codes.size, bits, data), CPU).numpy().reshape(-1)
    assert got.tobytes() == np.asarray(hidden.unpack(data, bits)).tobytes()


@given(arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, 2**32 - 1)))
def test_any_float32_bit_pattern_packs_as_the_reference_does(raw):
    assert_packs_alike(raw)


@given(st.integers(0, 2**32 - 1))
@example(0x3A7FFFFF)
@example(0x3A7FFFFE)
@example(0x7F800001)
@example(0xFFC00000)
@example(0x80000000)
@example(0x80000001)
@example(0x477FEFFF)
@example(0x477FF000)
@example(0x33000000)
@example(0x43700000)
@example(0x3C7FFFFF)
def test_values_around_a_bit_pattern_pack_as_the_reference_does(raw):
    around = (raw + np.arange(-4, 5)) % 2**32
    assert_packs_alike(around.astype(np.uint32))


def test_a_large_sample_of_bit_patterns_packs_as_the_reference_does():
    raw = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    assert_packs_alike(raw)


def test_every_16_bit_code_unpacks_as_the_reference_does():
    codes = np.arange(65536, dtype=np.uint16)
    got = upload(HiddenBatch(1, 65536, 16, memoryview(codes.tobytes())), CPU).numpy()[0]
    expected = load_npz("activation_vectors.npz")["f16_table"]
    assert got.tobytes() == expected.astype("<f4").tobytes()


def test_every_8_bit_code_unpacks_as_the_reference_does():
    assert_unpacks_alike(np.arange(256, dtype=np.uint8), 8)


@given(arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, 2**32 - 1)))
def test_any_32_bit_value_survives_unchanged(raw):
    assert_unpacks_alike(raw, 32)


def test_packing_equals_the_recorded_vectors():
    vectors = load_npz("activation_vectors.npz")
    values = torch.from_numpy(vectors["input"].reshape(1, -1).copy())
    assert bytes(download(values, 16).data) == vectors["f16_packed"].tobytes()
    assert bytes(download(values, 8).data) == vectors["f8_packed"].tobytes()


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_batch_keeps_its_rows(bits):
    values = torch.arange(12.0).view(3, 4)
    batch = download(values, bits)
    assert (batch.rows, batch.width, batch.bits) == (3, 4, bits)
    assert torch.equal(upload(batch, CPU), values)


def test_uploaded_states_are_memory_of_their_own():
    data = bytearray(np.ones(4, "<f4").tobytes())
    uploaded = upload(HiddenBatch(1, 4, 32, memoryview(data)), CPU)
    data[:] = bytes(16)
    assert torch.equal(uploaded, torch.ones(1, 4))


def test_a_slice_of_a_larger_tensor_is_packed_without_its_surroundings():
    values = torch.arange(24.0).view(3, 8)[:, 2:6]
    assert np.array_equal(download(values, 32).unpack(), values.numpy())
