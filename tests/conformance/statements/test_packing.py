"""Statements 81 to 86: activations of 32, 16 and 8 bits.

The two codecs of ds4py, the reference and the one of the device, are held to the same tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ds4py import activations
from ds4py.activations import HiddenBatch
from ds4py.contracts import CacheForm
from ds4py.engine.activation_codec import download, upload
from tests.clusters import span
from tests.conformance.statements.peer import (
    HASTY,
    HIDDEN_STATE,
    RESULT,
    WORK,
    Hop,
    dial,
    door,
    driven,
    driving,
    result,
    work,
    worker,
)
from tests.fake_runner import WIDTH, card
from tests.sockets import Background

SPEC = Path(__file__).parents[3] / "docs" / "spec" / "wire-protocol.md"
CPU = torch.device("cpu")
TOKENS = [5, 80, 3, 41, 9]
LAST = Hop(3, 5, 1)


class Row(NamedTuple):
    """One row of wire-protocol.md#worked-examples; bytes as they appear on the wire."""

    value: str
    f32: bytes
    f16: bytes
    from_f16: float
    f8: bytes
    from_f8: float


def number(text: str) -> float:
    """Read a value of the table: a decimal, a fraction, or a power of two."""
    base, power, exponent = text.partition("^")
    if power:
        return float(base) ** int(exponent)
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)


def worked_examples() -> list[Row]:
    """Read table docs/spec/wire-protocol.md#worked-examples where it stands."""
    section = SPEC.read_text().split("### 9.6 ")[1].split("\n---\n")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip().strip("`") for cell in line] for line in lines[2:]]
    return [
        Row(value, *map(bytes.fromhex, (f32, f16)), number(half), bytes.fromhex(f8), number(byte))
        for value, f32, f16, half, f8, byte in rows
    ]


EXAMPLES = worked_examples()


@dataclass(frozen=True)
class Codec:
    """Packs and unpacks flat float32."""

    name: str
    pack: Callable[[np.ndarray, int], bytes]
    unpack: Callable[[bytes, int], np.ndarray]

    def __str__(self) -> str:
        return self.name

    def from_bits(self, pattern: int, bits: int) -> bytes:
        """Pack one float32 given as its bit pattern."""
        return self.pack(np.array([pattern], "<u4").view("<f4"), bits)

    def of(self, value: float, bits: int) -> str:
        """Pack one value; hex."""
        return self.pack(np.array([value], "<f4"), bits).hex()


def device_pack(values: np.ndarray, bits: int) -> bytes:
    return bytes(download(torch.from_numpy(values.copy())[None], bits).data)


def device_unpack(data: bytes, bits: int) -> np.ndarray:
    batch = HiddenBatch(1, len(data) * 8 // bits, bits, memoryview(data))
    return upload(batch, CPU).numpy().reshape(-1)


codecs = pytest.mark.parametrize(
    "codec",
    [
        Codec("reference", activations.pack, activations.unpack),
        Codec("device", device_pack, device_unpack),
    ],
    ids=str,
)


def f32(*values: float) -> np.ndarray:
    return np.array(values, "<f4")


# --- 81 to 85: values -----------------------------------------------------------------------------


def test_statement_081_the_table() -> None:
    """The table of worked examples was read whole."""
    assert len(EXAMPLES) == 31
    assert (EXAMPLES[0].value, EXAMPLES[-1].value) == ("0.0", "240")


@codecs
@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: row.value)
def test_statement_081_worked_examples(row: Row, codec: Codec) -> None:
    """Every worked example packs to the bytes of the table and unpacks to its values."""
    values = np.frombuffer(row.f32, "<f4")
    for bits, packed in ((32, row.f32), (16, row.f16), (8, row.f8)):
        assert codec.pack(values, bits) == packed
    assert codec.unpack(row.f32, 32).tobytes() == row.f32
    back = row.f32 if np.isnan(row.from_f16) else f32(row.from_f16).tobytes()
    assert codec.unpack(row.f16, 16).tobytes() == back
    assert codec.unpack(row.f8, 8).tobytes() == f32(row.from_f8).tobytes()


@codecs
@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FABCDEF])
def test_statement_082_nan_in_16_bits(payload: int, codec: Codec) -> None:
    """In 16 bits every NaN becomes 7e00 or, with its sign, fe00."""
    assert codec.from_bits(payload, 16) == bytes.fromhex("007e")
    assert codec.from_bits(payload | 0x80000000, 16) == bytes.fromhex("00fe")


@codecs
@pytest.mark.parametrize(
    ("value", "code"),
    [
        (65504, "ff7b"),
        (np.nextafter(f32(65520), f32(0))[0], "ff7b"),
        (65520, "007c"),
        (3e38, "007c"),
        (2.0**-24, "0100"),
        (np.nextafter(f32(2.0**-25), f32(1))[0], "0100"),
        (2.0**-25, "0000"),
        (1e-45, "0000"),
        (2.0**-14 - 2.0**-26, "0004"),  # the carry of a subnormal makes it normal
        (1 + 2.0**-11, "003c"),  # a tie goes to the even neighbour
        (1 + 3 * 2.0**-11, "023c"),
    ],
)
def test_statement_082_edges_of_16_bits(value: float, code: str, codec: Codec) -> None:
    """In 16 bits 65520 and above are infinite, 2^-25 and below are zero, ties go to even."""
    assert codec.of(value, 16) == code
    low, high = bytes.fromhex(code)
    assert codec.of(-value, 16) == bytes([low, high | 0x80]).hex()


@codecs
def test_statement_083_the_largest_value_of_8_bits(codec: Codec) -> None:
    """In 8 bits 240, everything above it, infinity and NaN become 77, with the sign f7."""
    for value in (240, 448, 3e38, np.inf, np.nan):
        assert codec.of(value, 8) == "77"
        assert codec.of(-value, 8) == "f7"
    for payload in (0x7F800001, 0x7FFFFFFF):
        assert codec.from_bits(payload, 8) == b"\x77"
        assert codec.from_bits(payload | 0x80000000, 8) == b"\xf7"


@codecs
def test_statement_083_ties_of_8_bits(codec: Codec) -> None:
    """In 8 bits a value half-way between two codes goes to the one away from zero."""
    codes = np.arange(0x78, dtype=np.uint8)
    values = codec.unpack(codes.tobytes(), 8)
    ties = (values[:-1] + values[1:]) / 2
    above = codes[1:].copy()
    above[7] = 7  # between the largest subnormal and the smallest normal code: statement 84
    assert codec.pack(ties, 8) == above.tobytes()
    assert codec.pack(-ties, 8) == (above | 0x80).tobytes()
    below = np.nextafter(ties, f32(0))
    below[0] = np.array(0x3A7FFFFE, "<u4").view("<f4")  # the exception of the next test
    assert codec.pack(below, 8) == codes[:-1].tobytes()


@codecs
def test_statement_083_where_the_addition_is_rounded(codec: Codec) -> None:
    """In 8 bits 3a7fffff becomes 01 and 3a7ffffe 00: only there binary32 and exact sums differ."""
    assert codec.from_bits(0x3A7FFFFF, 8) == b"\x01"
    assert codec.from_bits(0x3A7FFFFE, 8) == b"\x00"
    half_way = [(np.float32((k + 0.5) / 512)).view(np.uint32) for k in range(8)]
    patterns = np.unique([int(at) + near for at in half_way for near in range(-40, 41)])
    values = patterns.astype("<u4").view("<f4")
    exact = np.minimum(np.floor(values.astype(np.float64) * 512 + 0.5), 7).astype(np.uint8)
    got = np.frombuffer(codec.pack(values, 8), np.uint8)
    assert patterns[got != exact].tolist() == [0x3A7FFFFF]


@codecs
def test_statement_084_below_the_smallest_normal_value(codec: Codec) -> None:
    """In 8 bits 7.5/512 and all between it and 8/512 become 07; 8/512 becomes 08."""
    top = np.nextafter(f32(8 / 512), f32(0))[0]
    assert [codec.of(value, 8) for value in (7.5 / 512, 7.75 / 512, top)] == ["07"] * 3
    assert codec.of(8 / 512, 8) == "08"
    assert codec.of(-7.5 / 512, 8) == "87"


@codecs
def test_statement_085_codes_that_are_never_sent(codec: Codec) -> None:
    """In 8 bits the codes 78 to 7f unpack to 240, and f8 to ff to -240; they pack to 77 and f7."""
    for codes, value, code in (
        (bytes(range(0x78, 0x80)), 240.0, b"\x77"),
        (bytes(range(0xF8, 0x100)), -240.0, b"\xf7"),
    ):
        values = codec.unpack(codes, 8)
        assert values.tolist() == [value] * 8
        assert codec.pack(values, 8) == code * 8


# --- 86: sizes ------------------------------------------------------------------------------------

widths = pytest.mark.parametrize("bits", [32, 16, 8])


@widths
@pytest.mark.parametrize(("n_hc", "n_embd", "in_8_bits"), [(4, 4096, 16_384), (4, 7168, 28_672)])
def test_statement_086_rows_of_the_real_models(
    n_hc: int, n_embd: int, in_8_bits: int, bits: int
) -> None:
    """A token of the two models takes the bytes of table wire-protocol.md#packed-sizes."""
    batch = HiddenBatch.pack(np.zeros((2, n_hc * n_embd), np.float32), bits)
    assert batch.data.nbytes == 2 * in_8_bits * bits // 8


@widths
def test_statement_086_what_a_coordinator_sends(bits: int) -> None:
    """A coordinator sends its hidden state in the configured width, and names that width."""
    config = replace(HASTY, activation_bits=bits)
    with driven(config=config, local="0-2", introduction={"layer_start": 3}) as (_, peer, session):
        for n_tokens in range(1, 6):
            running = Background(lambda n_tokens=n_tokens: session.sync(TOKENS[:n_tokens]))
            asked = peer.asked()
            assert asked.input_hc_bits == bits
            assert asked.input_hc_bytes == asked.n_tokens * WIDTH * bits // 8
            peer.send(RESULT, result(asked))
            running.result()


@pytest.mark.parametrize("bits", [32, 16, 8, 0])
def test_statement_086_what_a_worker_sends(bits: int) -> None:
    """A worker returns and forwards as many bytes as it has values of the width that came."""
    packed = len(TOKENS) * WIDTH * (bits or 32) // 8
    with driving("3:5") as peer:
        got = peer.check(work(Hop(3, 5), TOKENS, input_hc_bits=bits))
        assert (got.kind, got.bits, got.payload_bytes) == (HIDDEN_STATE, bits or 32, packed)
    with door() as behind, driving("0-2") as peer:
        onward = LAST._replace(port=behind.address.port)
        peer.send(WORK, work([Hop(0, 2), onward], TOKENS, input_hc_bits=bits))
        asked = behind.accept().asked()
        assert (asked.input_hc_bits, asked.input_hc_bytes) == (bits or 32, packed)


@pytest.mark.parametrize("bits", [32, 16, 8, 0])
def test_statement_086_no_byte_more_or_less(bits: int) -> None:
    """A hidden state with a byte, a value or a row too many or too few is refused."""
    value = (bits or 32) // 8
    whole = bytes(len(TOKENS) * WIDTH * value)
    with driving("3-5") as peer:
        for change in {1, value, WIDTH * value}:
            for wrong in (whole[change:], whole + bytes(change)):
                body = work(LAST, TOKENS, input_hc_bits=bits, hidden=wrong)
                assert "size does not match" in peer.refused(body)
        peer.check(work(LAST, TOKENS, input_hc_bits=bits, hidden=whole))


@pytest.mark.parametrize(("n_tokens", "words"), [(8, "too large"), (7, "size does not match")])
def test_statement_086_the_largest_size(n_tokens: int, words: str) -> None:
    """A hidden state of 2^32 bytes when unpacked is refused for that, whatever its packed size."""
    wide = 1 << 27
    form = CacheForm(ratios=(0,) * 6, width=wide, index_width=0, window=4096)
    identity = replace(card(), hidden_width=wide, cache_form=form)
    with worker(span("3-5"), identity=identity) as w, dial(w.address) as peer:
        body = work(LAST, [7] * n_tokens, input_hc_bits=8, hidden=b"")
        assert words in peer.refused(body)
