"""Type tables: they are the `gguf` package's, and unknown ids are never guessed at."""

import pytest
from gguf.constants import GGML_QUANT_SIZES

from ds4py.errors import UnsupportedQuantError
from ds4py.gguf import kinds


def test_every_type_of_the_package_has_its_name_and_block_size():
    assert set(kinds.known_types()) == {int(kind) for kind in GGML_QUANT_SIZES}
    for kind, (values, size) in GGML_QUANT_SIZES.items():
        assert kinds.type_name(int(kind)) == kind.name
        assert kinds.type_id(kind.name) == int(kind)
        assert (kinds.block_values(int(kind)), kinds.block_bytes(int(kind))) == (values, size)


@pytest.mark.parametrize(
    ("name", "dims", "size"),
    [("F32", (3, 2), 24), ("Q4_1", (64, 3), 120), ("Q6_K", (256,), 210), ("F16", (), 2)],
)
def test_packed_size_counts_whole_blocks(name: str, dims: tuple[int, ...], size: int):
    assert kinds.tensor_bytes(kinds.type_id(name), dims) == size


def test_an_unknown_type_has_a_printable_name_but_no_size():
    assert kinds.type_name(999) == "type 999"
    assert not kinds.is_known(999)
    with pytest.raises(UnsupportedQuantError, match="tensor type 999"):
        kinds.tensor_bytes(999, (32,))


def test_an_unknown_type_name_is_refused():
    with pytest.raises(UnsupportedQuantError, match="'Q9_9': unknown"):
        kinds.type_id("Q9_9")
