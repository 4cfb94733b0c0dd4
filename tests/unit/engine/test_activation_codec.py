"""The device codec: every code, every rounding boundary, and the reference codec bit by bit.

A packed code never falls while the magnitude grows, so the least magnitude of each code says
everything about packing. `first_magnitudes` has them by exact arithmetic from the definition of the
formats, and knows neither codec.
"""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ds4py import activations
from ds4py.activations import HiddenBatch
from ds4py.engine import activation_codec
from ds4py.engine.activation_codec import download, upload
from tests.support.golden import load_npz

CPU = torch.device("cpu")
WIDTHS = (32, 16, 8)
NARROW = (16, 8)
CODES = {32: "<f4", 16: "<u2", 8: "u1"}
SIGNS = {16: 0x8000, 8: 0x80}
N_PATTERNS = 2**32
INFINITY, MINUS = 0x7F800000, 0x80000000

on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


@cache
def first_magnitudes(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of the least float32 magnitude that becomes each code, rising, and those codes."""
    codes = np.arange(0x7C01 if bits == 16 else 0x78)
    values = activations.unpack(codes.astype(CODES[bits]).tobytes(), bits).astype(np.float64)
    if bits == 16:
        values[-1] = 65536  # what would follow the largest finite number
    halfway = ((values[1:] + values[:-1]) / 2).astype(np.float32)  # exactly
    firsts = np.concatenate(([0], halfway.view(np.uint32).astype(np.int64)))
    if bits == 8:  # ties go up
        firsts[1] = 0x3A7FFFFF
        firsts[8] = 0x3C800000  # no number below 2^-6 rounds up to it
        return firsts, codes
    firsts[1::2] += 1  # ties go to the even code
    return np.append(firsts, INFINITY + 1), np.append(codes, 0x7E00)


def expected_codes(raw: np.ndarray, bits: int) -> np.ndarray:
    """Codes of float32 bit patterns in any order."""
    firsts, codes = first_magnitudes(bits)
    code = codes[np.searchsorted(firsts, raw & ~np.uint32(MINUS), side="right") - 1]
    return (code | np.where(raw & MINUS, SIGNS[bits], 0)).astype(CODES[bits])


def expected_run(start: int, stop: int, bits: int) -> np.ndarray:
    """Codes of all float32 bit patterns in a range of one sign."""
    sign = SIGNS[bits] if start & MINUS else 0
    start, stop = start & ~MINUS, stop - (start & MINUS)
    firsts, codes = first_magnitudes(bits)
    ends = np.append(firsts[1:], MINUS).clip(start, stop)
    return np.repeat((codes | sign).astype(CODES[bits]), ends - firsts.clip(start, stop))


def packed(raw: np.ndarray, bits: int, device: str = "cpu") -> np.ndarray:
    """What the device makes of float32 bit patterns."""
    values = torch.from_numpy(raw.view(np.float32).reshape(1, -1).copy()).to(device)
    return np.frombuffer(download(values, bits).data, CODES[bits])


def assert_packs_alike(raw: np.ndarray) -> None:
    assert packed(raw, 32).tobytes() == raw.tobytes()
    for bits in NARROW:
        got = packed(raw, bits)
        assert np.array_equal(
            got, np.frombuffer(activations.pack(raw.view("f4"), bits), CODES[bits])
        )
        assert np.array_equal(got, expected_codes(raw, bits)), f"{bits} bits"


def unpacked(codes: np.ndarray, bits: int, device: str = "cpu") -> np.ndarray:
    """What the device makes of codes, as float32 bit patterns."""
    batch = HiddenBatch(1, codes.size, bits, memoryview(codes.tobytes()))
    return upload(batch, torch.device(device)).cpu().numpy().reshape(-1).view(np.uint32)


@given(arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, N_PATTERNS - 1)))
def test_any_float32_bit_pattern_packs_as_the_reference_does(raw):
    assert_packs_alike(raw)


@given(st.integers(0, N_PATTERNS - 1))
@example(0x3A7FFFFF)
@example(0x7F800001)
@example(0xFFC00000)
@example(0x80000000)
@example(0x477FEFFF)
@example(0x33000000)
@example(0x43700000)
@example(0x3C7FFFFF)
def test_values_around_a_bit_pattern_pack_as_the_reference_does(raw):
    around = (raw + np.arange(-4, 5)) % N_PATTERNS
    assert_packs_alike(around.astype(np.uint32))


@on_devices
@pytest.mark.parametrize("bits", NARROW)
def test_every_code_begins_and_ends_where_it_should(bits, device):
    firsts, _ = first_magnitudes(bits)
    edges = np.concatenate([firsts + delta for delta in (-2, -1, 0, 1)])
    raw = np.concatenate([edges, edges + MINUS]) % N_PATTERNS
    raw = raw.astype(np.uint32)
    assert np.array_equal(packed(raw, bits, device), expected_codes(raw, bits))


def test_a_large_sample_of_bit_patterns_packs_as_the_reference_does():
    assert_packs_alike(np.random.default_rng(0).integers(0, N_PATTERNS, 1 << 22, np.uint32))


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("bits", NARROW)
def test_every_float32_bit_pattern_packs_as_defined(bits, device):
    step = 1 << 24
    for start in range(0, N_PATTERNS, step):
        raw = np.arange(start, start + step, dtype=np.uint32)
        got = packed(raw, bits, device)
        assert np.array_equal(got, expected_run(start, start + step, bits)), hex(start)


@on_devices
@pytest.mark.parametrize(("bits", "table"), [(16, "f16_table"), (8, "f8_table")])
def test_every_code_unpacks_to_the_recorded_value(bits, table, device):
    codes = np.arange(1 << bits, dtype=CODES[bits])
    expected = load_npz("activation_vectors.npz")[table].view(np.uint32)
    assert np.array_equal(unpacked(codes, bits, device), expected)
    with np.errstate(invalid="ignore"):
        reference = np.asarray(activations.unpack(codes.tobytes(), bits)).view(np.uint32)
    assert np.array_equal(reference, expected)


@given(arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, N_PATTERNS - 1)))
def test_any_32_bit_value_survives_unchanged(raw):
    assert np.array_equal(unpacked(raw, 32), raw)


@on_devices
def test_packing_equals_the_recorded_vectors(device):
    vectors = load_npz("activation_vectors.npz")
    raw = vectors["input"].view(np.uint32)
    for bits, name in ((16, "f16"), (8, "f8")):
        codes = packed(raw, bits, device)
        assert np.array_equal(codes, vectors[f"{name}_packed"])
        recorded = vectors[f"{name}_unpacked"].view(np.uint32)
        assert np.array_equal(unpacked(codes, bits, device), recorded)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_batch_keeps_its_rows(bits):
    values = torch.arange(12.0).view(3, 4)
    batch = download(values, bits)
    assert (batch.rows, batch.width, batch.bits) == (3, 4, bits)
    assert torch.equal(upload(batch, CPU), values)


@pytest.mark.parametrize("bits", NARROW)
@pytest.mark.parametrize("shape", [(9, 1000), (5, 4096), (3, 5000), (1, 9000), (0, 8), (3, 0)])
def test_pieces_are_put_together_in_order(monkeypatch, bits, shape):
    monkeypatch.setattr(activation_codec, "_CPU_PIECE", 4096)
    raw = np.random.default_rng(1).integers(0, N_PATTERNS, shape, np.uint32)
    codes = activation_codec.pack(torch.from_numpy(raw.view(np.float32)), bits)
    assert codes.shape == shape
    expected = expected_codes(raw, bits)
    assert np.array_equal(codes.numpy().view(CODES[bits]), expected)
    reference = activations.unpack(expected.tobytes(), bits)
    assert activation_codec.unpack(codes, bits).numpy().tobytes() == reference.tobytes()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("is_lent", [True, False], ids=["lent", "read-only"])
def test_uploaded_states_are_memory_of_their_own(bits, is_lent):
    data = download(torch.ones(1, 4), bits).data
    buffer = bytearray(data) if is_lent else bytes(data)
    uploaded = upload(HiddenBatch(1, 4, bits, memoryview(buffer)), CPU)
    if is_lent:
        buffer[:] = bytes(len(buffer))
    uploaded += 1
    assert torch.equal(uploaded, torch.full((1, 4), 2.0))
    assert is_lent or bytes(data) == buffer


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_slice_of_a_larger_tensor_is_packed_without_its_surroundings(bits):
    values = torch.arange(24.0).view(3, 8)[:, 2:6]
    assert bytes(download(values, bits).data) == activations.pack(values.numpy(), bits)
    assert bytes(download(values.T, bits).data) == activations.pack(values.numpy().T, bits)


@pytest.mark.parametrize("bits", NARROW)
def test_packing_leaves_the_values_alone(bits):
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    before = values.clone()
    download(values, bits)
    assert torch.equal(values, before)
