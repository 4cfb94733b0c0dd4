"""The rolling hash equals its byte-by-byte definition."""

import pytest
from hypothesis import example, given

from ds4py.wire.prefix_hash import INIT, extend, prefix_hash
from tests.strategies import token_lists


def definition(tokens, h=0x14650FB0739D0383):
    """docs/spec/wire-protocol.md#prefix-hash, word for word."""
    for token in tokens:
        for byte in token.to_bytes(4, "little"):
            h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


@given(token_lists)
@example((0, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**32 - 1))
def test_the_fast_form_equals_the_definition(tokens):
    assert prefix_hash(tokens) == definition(tokens)


@given(token_lists, token_lists)
def test_hashing_in_two_steps_equals_hashing_at_once(first, second):
    assert extend(prefix_hash(first), second) == prefix_hash(first + second)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((), 0x14650FB0739D0383),
        ((1,), 0x91599A98306C74A2),
        ((1, 2), 0xE90DEE64F8338EA0),
        ((1, 2, 3), 0x6FDEDB25BBB27E53),
        ((1, 2, 3, 4), 0x46740F53C6E47347),
        ((0,), 0x315446A086A23133),
        ((129279,), 0x4CA300642CED76ED),
        ((5, 6, 7, 8), 0xA93424382C940C4F),
        ((100000, 1, 65536), 0x513214840023A9A4),
    ],
)
def test_the_vectors_of_the_spec(tokens, expected):
    assert prefix_hash(tokens) == expected


def test_the_start_value_is_not_the_usual_one():
    assert INIT == 1469598103934665603
