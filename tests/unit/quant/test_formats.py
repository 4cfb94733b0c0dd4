"""Decoders of every tensor type, against the `gguf` package and against hand-made blocks."""

import struct

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import quants
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4py.errors import UnsupportedQuantError
from ds4py.quant.formats import FORMATS, QuantFormat, format_of
from tests.quant_blocks import any_blocks, finite_blocks

torch.set_num_threads(1)

BY_NAME = {kind.name: kind for kind in FORMATS.values()}

PLAIN_NUMPY = {
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F64": "<f8",
}
"""Plain types that the gguf package stores but does not dequantize."""

ALL_NAMES = [
    *("F32", "F16", "BF16", *PLAIN_NUMPY),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
]

seeds = st.integers(0, 2**32 - 1)


def decode(name: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return BY_NAME[name].decode(torch.from_numpy(blocks)).numpy()


def oracle(name: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        if name in PLAIN_NUMPY:
            return blocks.view(PLAIN_NUMPY[name]).astype(np.float32)
        flat = quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[name])
    return flat.reshape(len(blocks), -1)


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def block(*parts: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(1, -1).copy()


def test_every_type_that_the_gguf_package_dequantizes_is_covered() -> None:
    """Fails when the package learns a new type, so that ds4py learns it too."""
    known = {kind.name for kind in quants._type_traits} | {"F32", "F16"}
    assert known == set(ALL_NAMES) - set(PLAIN_NUMPY)
    assert set(BY_NAME) == set(ALL_NAMES)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_ids_and_sizes_are_those_of_the_standard(name: str) -> None:
    kind = BY_NAME[name]
    standard = gguf.GGMLQuantizationType[name]
    assert kind.type_id == standard.value
    assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[standard]
    assert format_of(standard.value, tensor="t") is kind


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(max_examples=12, deadline=None)
@given(seed=seeds)
@example(seed=0)
def test_decodes_to_the_same_bits_as_the_oracle(name: str, seed: int) -> None:
    blocks = finite_blocks(BY_NAME[name], seed, 33)
    values = decode(name, blocks)
    assert values.dtype == np.float32
    assert values.shape == (33, BY_NAME[name].block_values)
    expected = oracle(name, blocks)
    assert np.isfinite(expected).all() or name in {"F64", "MXFP4"}
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_infinite_and_nan_scales_decode_as_in_the_oracle(name: str, seed: int) -> None:
    blocks = any_blocks(BY_NAME[name], seed, 200)
    np.testing.assert_array_equal(decode(name, blocks), oracle(name, blocks))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_decoding_does_not_change_the_blocks(name: str) -> None:
    blocks = torch.from_numpy(finite_blocks(BY_NAME[name], 3, 5))
    before = blocks.clone()
    BY_NAME[name].decode(blocks)
    assert torch.equal(blocks, before)


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, 1), slice(1, 2), slice(3, None)])
def test_a_run_of_blocks_decodes_like_a_part_of_the_whole(name: str, cut: slice) -> None:
    """Blocks of odd sizes start at odd addresses, and there may be one or none."""
    blocks = torch.from_numpy(finite_blocks(BY_NAME[name], 4, 7))
    whole = BY_NAME[name].decode(blocks)
    assert torch.equal(BY_NAME[name].decode(blocks[cut]), whole[cut])


@pytest.mark.parametrize("name", ALL_NAMES)
def test_blocks_need_not_be_contiguous(name: str) -> None:
    blocks = torch.from_numpy(finite_blocks(BY_NAME[name], 5, 8))
    assert torch.equal(BY_NAME[name].decode(blocks[::2]), BY_NAME[name].decode(blocks)[::2])


def test_q4_0_by_hand() -> None:
    """Byte i holds code i in the low and code i + 16 in the high nibble; 8 is zero."""
    codes = bytes((15 - i) << 4 | i for i in range(16))
    expected = [2.0 * (i - 8) for i in range(16)] + [2.0 * (7 - i) for i in range(16)]
    assert decode("Q4_0", block(half(2.0), codes)).tolist() == [expected]


def test_q4_1_by_hand() -> None:
    """The minimum is added after scaling."""
    codes = bytes((15 - i) << 4 | i for i in range(16))
    expected = [0.5 * i - 3 for i in range(16)] + [0.5 * (15 - i) - 3 for i in range(16)]
    assert decode("Q4_1", block(half(0.5), half(-3.0), codes)).tolist() == [expected]


def test_q8_0_by_hand() -> None:
    """Codes are signed bytes."""
    codes = struct.pack("32b", -128, 127, *range(-15, 15))
    expected = [32.0, -31.75, *(-0.25 * i for i in range(-15, 15))]
    assert decode("Q8_0", block(half(-0.25), codes)).tolist() == [expected]


def test_q6_k_by_hand() -> None:
    """Value 128 c + 32 f + i: nibble in byte 64 c + 32 (f mod 2) + i, upper bits in 32 c + i."""
    low, high = bytearray(128), bytearray(64)
    low[64 + 32 + 5] = 0x90  # half 1, field 3, value 5: upper nibble 9
    high[32 + 5] = 0b11_00_00_00
    scales = struct.pack("16b", *range(-8, 8))
    expected = np.repeat(np.arange(-8, 8), 16) * -32.0 * 0.5
    expected[128 + 96 + 5] = 6 * (0b11_1001 - 32) * 0.5
    blocks = block(bytes(low), bytes(high), scales, half(0.5))
    np.testing.assert_array_equal(decode("Q6_K", blocks)[0], expected)


def test_iq4_nl_by_hand() -> None:
    """Codes are an index into sixteen unevenly spaced numbers."""
    spaced = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    codes = bytes((15 - i) << 4 | i for i in range(16))
    expected = [0.5 * v for v in spaced] + [0.5 * v for v in reversed(spaced)]
    assert decode("IQ4_NL", block(half(0.5), codes)).tolist() == [expected]


@pytest.mark.parametrize(
    ("name", "halves", "first", "last", "total", "squares"),
    [
        ("Q8_0", {0: 1.0}, [85, 122, -97, -60, -23, 14, 51, 88], [], -176, 190256),
        (
            "Q2_K",
            {80: 1.0, 82: 0.5},
            [33, 0, 11, 22, 33, 0, 11, 22],
            [-1.5, -1.5, 4.5, 4.5],
            2059,
            54476,
        ),
        (
            "Q4_K",
            {0: 1.0, 2: 0.5},
            [315.5, -25.5, 129.5, 284.5, 439.5, 98.5, 253.5, 408.5],
            [],
            54440,
            24165220,
        ),
        (
            "IQ2_XXS",
            {0: 1.0},
            [-59.125, 59.125, 34.375, -34.375, 34.375, -11, -34.375, 11],
            [],
            763.75,
            770564.1875,
        ),
    ],
)
def test_golden_blocks_of_the_specification(
    name: str,
    halves: dict[int, float],
    first: list[float],
    last: list[float],
    total: float,
    squares: float,
) -> None:
    """docs/spec/deepseek4-model.md#format-tables."""
    golden = bytearray((37 * i + 11) % 256 for i in range(BY_NAME[name].block_bytes))
    for offset, value in halves.items():
        golden[offset : offset + 2] = half(value)
    values = decode(name, block(bytes(golden)))[0].astype(np.float64)
    assert values[:8].tolist() == first
    assert values[len(values) - len(last) :].tolist() == last
    assert values.sum() == total
    assert (values**2).sum() == squares


def half_at(raw: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", raw, offset)[0])


def slow_q4_1(raw: bytes) -> list[float]:
    d, m = half_at(raw, 0), half_at(raw, 2)
    codes = [raw[4 + i % 16] >> 4 * (i // 16) & 15 for i in range(32)]
    return [d * code + m for code in codes]


def slow_q2_k(raw: bytes) -> list[float]:
    scales, codes = raw[:16], raw[16:80]
    d, dmin = half_at(raw, 80), half_at(raw, 82)
    values = []
    for i in range(256):
        g = i // 16
        code = codes[32 * (g // 8) + 16 * (g % 2) + i % 16] >> 2 * (g % 8 // 2) & 3
        values.append(d * (scales[g] & 15) * code - dmin * (scales[g] >> 4))
    return values


def slow_q4_k(raw: bytes) -> list[float]:
    d, dmin, k, codes = half_at(raw, 0), half_at(raw, 2), raw[4:16], raw[16:]
    values = []
    for i in range(256):
        j = i // 32
        if j < 4:
            scale, minimum = k[j] & 63, k[j + 4] & 63
        else:
            scale = (k[j + 4] & 15) + 16 * (k[j - 4] >> 6)
            minimum = (k[j + 4] >> 4) + 16 * (k[j] >> 6)
        code = codes[32 * (j // 2) + i % 32] >> 4 * (j % 2) & 15
        values.append(d * scale * code - dmin * minimum)
    return values


@pytest.mark.parametrize(
    ("name", "slow"), [("Q4_1", slow_q4_1), ("Q2_K", slow_q2_k), ("Q4_K", slow_q4_k)]
)
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_decodes_as_the_formula_read_value_by_value(name: str, slow: object, seed: int) -> None:
    """The products are exact, so one rounding of the exact result must give the same float."""
    blocks = finite_blocks(BY_NAME[name], seed, 4)
    assert callable(slow)
    expected = np.array([slow(row.tobytes()) for row in blocks]).astype(np.float32)
    np.testing.assert_array_equal(decode(name, blocks), expected)


@pytest.mark.parametrize("type_id", [9, 15, 31, 99, -1])
def test_an_unknown_type_is_refused_with_tensor_type_and_alternatives(type_id: int) -> None:
    with pytest.raises(UnsupportedQuantError, match=rf"blk\.7\.x.*{type_id}.*Q4_K.*IQ2_XXS"):
        format_of(type_id, tensor="blk.7.x")


def test_the_table_can_not_be_changed() -> None:
    with pytest.raises(TypeError):
        FORMATS[0] = FORMATS[1]  # type: ignore[index]  # that is the point


@pytest.mark.cuda
@pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
def test_cuda_decodes_to_the_same_values_as_the_cpu(kind: QuantFormat) -> None:
    blocks = torch.from_numpy(finite_blocks(kind, 6, 500))
    values = kind.decode(blocks.cuda())
    assert values.device.type == "cuda"
    torch.testing.assert_close(values.cpu(), kind.decode(blocks), rtol=0, atol=0)
