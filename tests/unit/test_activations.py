"""The reference codec of hidden states: wire-protocol.md#worked-examples, monotone, stable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.activations import HiddenBatch, pack, unpack
from ds4py.errors import ModelError
from tests.golden import load_npz
from tests.strategies import float32s

# rows of docs/spec/wire-protocol.md#worked-examples: value, f16 bytes, decoded f16, f8 byte,
# decoded f8
TABLE = [
    (0.0, "0000", 0.0, "00", 0.0),
    (-0.0, "0080", -0.0, "80", -0.0),
    (1.0, "003c", 1.0, "38", 1.0),
    (-1.5, "00be", -1.5, "bc", -1.5),
    (0.1, "662e", 0.0999755859375, "1d", 0.1015625),
    (448, "005f", 448, "77", 240),
    (1000, "d063", 1000, "77", 240),
    (-1000, "d0e3", -1000, "f7", -240),
    (1e-9, "0000", 0.0, "00", 0.0),
    (np.inf, "007c", np.inf, "77", 240),
    (-np.inf, "00fc", -np.inf, "f7", -240),
    (3.14159265, "4842", 3.140625, "45", 3.25),
    (65504, "ff7b", 65504, "77", 240),
    (65519, "ff7b", 65504, "77", 240),
    (65520, "007c", np.inf, "77", 240),
    (6.1e-5, "ff03", 6.097555160522461e-05, "00", 0.0),
    (2**-24, "0100", 5.960464477539063e-08, "00", 0.0),
    (2**-25, "0000", 0.0, "00", 0.0),
    (2**-10, "0014", 2**-10, "01", 2**-9),
    (2**-9, "0018", 2**-9, "01", 2**-9),
    (7.5 / 512, "8023", 7.5 / 512, "07", 7 / 512),
    (2**-6, "0024", 2**-6, "08", 2**-6),
    (1.0625, "403c", 1.0625, "39", 1.125),
    (1.1875, "c03c", 1.1875, "3a", 1.25),
    (17.5, "604c", 17.5, "59", 18),
    (100, "4056", 100, "6d", 104),
    (231.9, "3f5b", 231.875, "76", 224),
    (232, "405b", 232, "77", 240),
    (240, "805b", 240, "77", 240),
]


def f32(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(("value", "half", "half_back", "byte", "byte_back"), TABLE)
def test_the_worked_examples_of_the_spec(value, half, half_back, byte, byte_back):
    assert pack(f32(value), 16).hex() == half
    assert pack(f32(value), 8).hex() == byte
    for raw, bits, back in ((half, 16, half_back), (byte, 8, byte_back)):
        got = unpack(bytes.fromhex(raw), bits)
        assert got.tobytes() == f32(back).tobytes()  # bytes, so that -0.0 is not 0.0


@pytest.mark.parametrize(("bits", "name"), [(16, "f16"), (8, "f8")])
def test_the_recorded_vectors(bits, name):
    vectors = load_npz("activation_vectors.npz")
    packed = pack(vectors["input"], bits)
    assert packed == vectors[f"{name}_packed"].tobytes()
    assert unpack(packed, bits).tobytes() == vectors[f"{name}_unpacked"].tobytes()


@pytest.mark.parametrize(
    ("raw", "half", "byte"), [(0x7FC00000, "007e", "77"), (0xFFC12345, "00fe", "f7")]
)
def test_nan_becomes_one_quiet_nan_or_the_largest_value(raw, half, byte):
    value = np.array([raw], np.uint32).view(np.float32)
    assert (pack(value, 16).hex(), pack(value, 8).hex()) == (half, byte)


@pytest.mark.parametrize(("raw", "code"), [(0x3A7FFFFF, "01"), (0x3A7FFFFE, "00")])
def test_the_one_magnitude_where_binary32_addition_matters(raw, code):
    assert pack(np.array([raw], np.uint32).view(np.float32), 8).hex() == code


def test_all_codes_with_a_full_exponent_decode_to_240():
    assert set(unpack(bytes(range(0x78, 0x80)), 8)) == {240.0}
    assert set(unpack(bytes(range(0xF8, 0x100)), 8)) == {-240.0}


def test_32_bits_keep_every_bit_even_of_nan():
    raw = np.array([0x7F800001, 0xFFFFFFFF, 1], np.uint32).view(np.float32)
    assert pack(raw, 32) == raw.tobytes()
    assert unpack(raw.tobytes(), 32).tobytes() == raw.tobytes()


@given(float32s, st.sampled_from([32, 16, 8]))
def test_encoding_a_decoded_value_again_gives_the_same_bytes(values, bits):
    packed = pack(values, bits)
    assert pack(unpack(packed, bits), bits) == packed


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2), st.sampled_from([16, 8]))
def test_encoding_is_monotone(values, bits):
    decoded = unpack(pack(np.sort(f32(*values)), bits), bits)
    assert np.all(decoded[:-1] <= decoded[1:])


@given(float32s, st.sampled_from([16, 8]))
def test_encoding_a_negated_value_flips_only_the_sign_bit(values, bits):
    sign = {16: 0x8000, 8: 0x80}[bits]
    dtype = {16: "<u2", 8: "u1"}[bits]
    plus, minus = (np.frombuffer(pack(v, bits), dtype) for v in (values, -values))
    assert np.array_equal(plus ^ sign, minus)


@pytest.mark.parametrize("bits", [16, 8])
def test_every_canonical_code_decodes_and_encodes_to_itself(bits):
    codes = np.arange(1 << bits, dtype="<u2" if bits == 16 else "u1")
    values = unpack(codes.tobytes(), bits)
    again = np.frombuffer(pack(values, bits), codes.dtype)
    lossy = np.isnan(values) if bits == 16 else (codes & 0x7F) > 0x77
    assert np.array_equal(again[~lossy], codes[~lossy])


@pytest.mark.parametrize(("bits", "size"), [(32, 24), (16, 12), (8, 6)])
def test_a_batch_knows_its_rows_and_gives_them_back(bits, size):
    values = f32(1, 2, 3, -1, -2, -3).reshape(2, 3)
    batch = HiddenBatch.pack(values, bits)
    assert (batch.rows, batch.width, batch.data.nbytes) == (2, 3, size)
    assert np.array_equal(batch.unpack(), values)


def test_packing_takes_values_that_are_not_contiguous():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert pack(values.T, 32) == values.T.copy().tobytes()


@pytest.mark.parametrize(("bits", "size"), [(32, 23), (32, 25), (16, 24), (12, 9), (0, 0)])
def test_a_batch_whose_bytes_do_not_fit_its_shape_does_not_exist(bits, size):
    with pytest.raises(ModelError, match=f"got {size} bytes at {bits} bits"):
        HiddenBatch(2, 3, bits, memoryview(bytes(size)))
